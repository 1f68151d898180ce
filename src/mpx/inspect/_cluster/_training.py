"""The small training run of the conformance checks: sharded under jit, or as copies."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from mpx._amp._transform import amp
from mpx._casting._cast import cast_to_float32
from mpx._gradients._grad import value_and_grad
from mpx._optim import flash_adamw
from mpx._scaling._dynamic_scaling import DynamicLossScaling
from mpx.testing._faults import Fault, Kind, inject

Layout = Literal["sharded", "copies"]
ROWS = 4  # of the batch, on each device
STEPS = 16  # of a run: all checks share one program for each layout


def make_mesh() -> Mesh:
    """Returns the mesh of all devices of all processes."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def half() -> str:
    """Returns the compute dtype: CPUs widen bf16 collectives, so they take f16."""
    return "f16" if jax.default_backend() == "cpu" else "bf16"


class Training:
    """A small model with compressed AdamW and dynamic loss scaling, on all devices.

    `sharded` cuts the rows of each matrix over all devices and trains under `jit` (FSDP).
    `copies` keeps everything on every device and trains under `shard_map`, where a fault
    hits the copy of one device alone.

    Attributes:
        mesh: All devices.
        layout: Where parameters and optimizer state lie.
        where: The shardings of the state.
    """

    def __init__(self, mesh: Mesh, layout: Layout = "sharded") -> None:
        """Makes the programs; nothing is compiled yet."""
        self.mesh, self.layout = mesh, layout
        self._width = mesh.size * -(-64 // mesh.size)
        self._optimizer = flash_adamw(3e-3)
        self.where = jax.tree.map(self._place, jax.eval_shape(self._init))
        everywhere = NamedSharding(mesh, P())
        run = self._run
        if layout == "copies":
            run = jax.shard_map(
                run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
            )
        self._jitted = jax.jit(run, out_shardings=(self.where, everywhere))

    def start(self) -> PyTree:
        """Returns the state before the first step."""
        return jax.jit(self._init, out_shardings=self.where)()

    def template(self) -> PyTree:
        """Returns the shapes and shardings of the state."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(self._init),
            self.where,
        )

    def run(
        self, state: PyTree, first: int, faults: list[Fault]
    ) -> tuple[PyTree, list[list[bool]]]:
        """Runs one step for each fault, in one program.

        Args:
            state: The state; it is not changed.
            first: The number of the first step. The batch depends on the number only.
            faults: One fault for each step, which may lie at no step at all.

        Returns:
            The new state, and for each local device which steps it skipped.
        """
        stacked = jax.tree.map(lambda *x: np.stack(jax.device_get(x)), *faults)
        state, finite = self._jitted(state, np.int32(first), stacked)
        shards = sorted(finite.addressable_shards, key=lambda x: x.device.id)
        return state, [(~np.asarray(shard.data)).tolist() for shard in shards]

    def fault(self, step: int, device: int) -> Fault:
        """Returns a fault on one device that makes gradients non-finite.

        Its kind, its leaf and its direction depend on the step. Infinities go backward
        only: forward, they may end in the flat part of an activation.
        """
        backward = bool(step % 2)
        kinds: tuple[Kind, ...] = ("nan", "inf", "-inf")
        return Fault(
            {"params": self.template()["params"]},
            kinds[step % 3] if backward else "nan",
            leaf=("params/up", "params/down")[step // 2 % 2],
            index=step,
            step=step,
            device=device,
            backward=backward,
        )

    def calm(self, steps: int) -> list[Fault]:
        """Returns faults that never happen."""
        return [Fault({"params": self.template()["params"]}, step=-1)] * steps

    def compile_step(self, **options: Any) -> Any:
        """Compiles one training step without faults.

        Args:
            **options: The options of the compiler.
        """
        step = jax.jit(self._step, out_shardings=(self.where, None))
        number = jax.ShapeDtypeStruct((), jnp.int32)
        return step.lower(self.template(), number).compile(options or None)

    def _init(self) -> PyTree:
        width = self._width
        up, down = jax.random.split(jax.random.key(0))
        params = {
            "up": jax.random.normal(up, (width, 4 * width)) * width**-0.5,
            "bias": jnp.zeros(4 * width),
            "down": jax.random.normal(down, (4 * width, width)) * 0.5 * width**-0.5,
        }
        scaling = DynamicLossScaling.pow2(2.0**10)
        return {
            "params": params,
            "optimizer": self._optimizer.init(params),
            "scaling": scaling,
        }

    def _place(self, leaf: Any) -> NamedSharding:
        has_rows = leaf.ndim >= 2 and leaf.shape[-2] % self.mesh.size == 0
        is_cut = self.layout == "sharded" and has_rows
        spec = P(*[None] * (leaf.ndim - 2), "data") if is_cut else P()
        return NamedSharding(self.mesh, spec)

    def _run(self, state: PyTree, first: Array, faults: Fault) -> tuple[PyTree, Array]:
        count = faults.step.shape[0]
        numbers = first + jnp.arange(count, dtype=jnp.int32)
        return lax.scan(lambda c, x: self._step(c, *x), state, (numbers, faults))

    def _step(
        self, state: PyTree, number: Array, fault: Fault | None = None
    ) -> tuple[PyTree, Array]:
        axis = "data" if self.layout == "copies" else None
        key = jax.random.fold_in(jax.random.key(1), number)
        rows = ROWS * self.mesh.size
        if axis is not None:
            key, rows = jax.random.fold_in(key, lax.axis_index(axis)), ROWS

        def along(x: Array) -> Array:
            if axis is not None:
                return x
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data")))

        def loss(params: PyTree, x: Array) -> Array:
            if fault is not None:
                tree = {"params": params}
                params = inject(tree, fault, number, axis_name=axis)["params"]
            hidden = jax.nn.relu(along(x @ params["up"]) + params["bias"])
            out = along(hidden @ params["down"])
            return jnp.mean(cast_to_float32(out - x) ** 2)

        x = along(jax.random.normal(key, (rows, self._width)))
        take = value_and_grad(amp(loss, half()), axis_name=axis)
        result = take(state["scaling"], state["params"], x)
        params, optimizer = self._optimizer.step(
            state["params"], state["optimizer"], result.grads, finite=result.finite
        )
        new = {"params": params, "optimizer": optimizer, "scaling": result.scaling}
        return new, result.finite
