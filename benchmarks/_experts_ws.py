# ruff: noqa
import functools
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from mpx._experts._groups import ALIGNMENT, row_blocks


def _transforms(shape, dtype):
    bits = shape[-1] * jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(bits)
    return (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )


def multiply_rows(
    x, w, sizes, *, turned, dtype, blocks, programs=132, interpret=False, chunk=64
):
    (m, k), groups = x.shape, len(w)
    n = w.shape[1] if turned else w.shape[2]
    rows, columns, summed, steps, width = blocks
    half = columns // 2
    table = row_blocks(sizes, m, rows)
    grid = table[0].size, n // columns
    x_t = _transforms((rows, summed), x.dtype)
    w_t = _transforms((columns, summed) if turned else (summed, half), w.dtype)

    def body(*refs):
        groups_ref, firsts_ref, begins_ref, counts_ref, x_ref, w_ref, out_ref = refs
        wg = lax.axis_index("wg")
        mine = pl.ds(wg * half, half)

        def pipeline(step, context):
            return plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(k // summed,),
                memory_registers=40,
                in_specs=[
                    plgpu.BlockSpec(
                        (rows, summed),
                        lambda k: (0, k),
                        transforms=x_t,
                        delay_release=1,
                    ),
                    plgpu.BlockSpec(
                        (columns, summed),
                        lambda k: (0, k),
                        transforms=w_t,
                        delay_release=1,
                    )
                    if turned
                    else plgpu.BlockSpec(
                        (summed, columns),
                        lambda k: (k, 0),
                        transforms=w_t,
                        delay_release=1,
                    ),
                ],
                wg_axis="wg",
                num_compute_wgs=2,
                max_concurrent_steps=steps,
                compute_context=context,
            )

        ignore = lambda *_, **__: None
        w0 = w_ref.at[0]

        @functools.partial(
            pl.run_scoped,
            allocs=pipeline(ignore, ignore).get_allocations(x_ref, w0),
            staged=plgpu.SMEM((2, rows, chunk), dtype),
            collective_axes="wg",
        )
        def _(allocs, staged):
            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="program")
            def _(loop):
                i, j = plgpu.planar_snake(loop.index[0], grid, 1, width)
                count = counts_ref[i]

                def store(total):
                    first, begin = (
                        pl.multiple_of(firsts_ref[i], ALIGNMENT),
                        begins_ref[i],
                    )
                    for c in range(half // chunk):
                        out = out_ref.at[
                            :, pl.ds(j * columns + wg * half + c * chunk, chunk)
                        ]
                        buffer = staged.at[wg]
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        buffer[...] = total[:, c * chunk : (c + 1) * chunk].astype(
                            dtype
                        )
                        plgpu.commit_smem()
                        at, length = begin, rows
                        while length:

                            @pl.when(count & length != 0)
                            def _(at=at, length=length):
                                plgpu.copy_smem_to_gmem(
                                    buffer.at[pl.ds(at, length)],
                                    out.at[pl.ds(first + at, length)],
                                )

                            at += count & length
                            length //= 2

                @pl.when(count > 0)
                def _():
                    group = groups_ref[i]
                    first = pl.multiple_of(firsts_ref[i], ALIGNMENT)

                    def context(run):
                        def scope(total):
                            run(total)
                            store(total[...])

                        pl.run_scoped(scope, plgpu.ACC((rows, half), jnp.float32))

                    def step(_, x, w, total):
                        plgpu.wgmma(
                            total,
                            x,
                            w.at[mine].transpose((1, 0)) if turned else w.at[:, mine],
                        )
                        plgpu.wgmma_wait(1)
                        return total

                    @pl.when(group < groups)
                    def _():
                        wide = pl.ds(j * columns, columns)
                        mat = (
                            w_ref.at[group, wide]
                            if turned
                            else w_ref.at[group, :, wide]
                        )
                        pipeline(step, context)(
                            x_ref.at[pl.ds(first, rows)], mat, allocations=allocs
                        )

                    @pl.when((group == groups) & (wg < 2))
                    def _():
                        store(
                            plgpu.layout_cast(
                                jnp.zeros((rows, half), jnp.float32), plgpu.Layout.WGMMA
                            )
                        )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*table, x, w)
