"""Deliberate breaks of mpx, and the test that each of them must turn red.

`python tests/breaks.py` applies one break after the other to a copy of `src/mpx`, runs its
test against the copy, and expects a failure. A break that survives is a hole in the tests.
`--check` only looks whether each text still occurs once; `tests/test_breaks.py` does so
in every test run, so that the list cannot rot.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
SRC = ROOT / "src" / "mpx"


class Break(NamedTuple):
    """One wrong edit.

    Attributes:
        name: What goes wrong.
        room: The package under `src/mpx`, in which `old` occurs once.
        old: The text that is replaced.
        new: The replacement.
        test: The test file, without `test_` and `.py`.
        select: The expression for `pytest -k`.
    """

    name: str
    room: str
    old: str
    new: str
    test: str
    select: str


BREAKS = [
    # --- _casting ---------------------------------------------------------------------
    Break(
        "statistics are narrowed",
        "_casting",
        "if dtype.itemsize > leaf.dtype.itemsize else leaf",
        "if True else leaf",
        "cast",
        "statistics_of_nnx",
    ),
    Break(
        "force_full_precision does not widen",
        "_casting",
        "args, kwargs = widen_tree((args, kwargs))",
        "",
        "cast",
        "full_precision_inside",
    ),
    Break(
        "cast_function ignores return_dtype",
        "_casting",
        "results or low",
        "low",
        "cast",
        "decorator_with_arguments",
    ),
    Break(
        "where= is ignored",
        "_casting",
        "if where is not None and selected.find(name, leaf) is None:",
        "if False:",
        "cast",
        "where_chooses",
    ),
    Break(
        "keep= is ignored",
        "_casting",
        "selected or always or is_state(name)",
        "always or is_state(name)",
        "grad_options",
        "what_is_kept",
    ),
    Break(
        "batch_stats are rounded",
        "_casting",
        "return is_statistic(name) or any(",
        "return any(",
        "policy_keep",
        "linen_batch_statistics",
    ),
    Break(
        "an input is kept by a part of its name",
        "_casting",
        "re.fullmatch(pattern, name)",
        "re.search(pattern, name)",
        "policy_keep",
        "array_argument",
    ),
    # --- _scaling ---------------------------------------------------------------------
    Break(
        "unscale multiplies",
        "_scaling",
        "x / self.loss_scaling",
        "x * self.loss_scaling",
        "loss_scaling",
        "powers_of_two",
    ),
    Break(
        "16-bit leaves are scaled in 16 bits",
        "_scaling",
        "fn(x.astype(at_least_f32(x.dtype)))",
        "fn(x)",
        "loss_scaling",
        "scaling_happens_in_f32",
    ),
    Break(
        "growth comes one step late",
        "_scaling",
        "self.counter >= self.period - 1",
        "self.counter >= self.period",
        "loss_scaling",
        "growth_comes_after",
    ),
    Break(
        "overflow does not restart the count",
        "_scaling",
        "jnp.where(finite & ~grow, self.counter + 1, 0)",
        "jnp.where(~grow, self.counter + 1, 0)",
        "loss_scaling",
        "backoff_comes_at_once",
    ),
    Break(
        "hysteresis is ignored",
        "_scaling",
        "~finite & (tolerance <= 0)",
        "~finite",
        "loss_scaling",
        "hysteresis_forgives",
    ),
    Break(
        "the scale has no ceiling",
        "_scaling",
        "scale = jnp.minimum(scale, jnp.float32(self.max_loss_scaling))",
        "",
        "loss_scaling",
        "default_cap",
    ),
    Break(
        "a scale that is nan stays nan",
        "_scaling",
        "jnp.fmax(",
        "jnp.maximum(",
        "loss_scaling",
        "became_nan",
    ),
    Break(
        "devices adjust their scales apart",
        "_scaling",
        "finite = all_devices(finite, axis_name)",
        "pass",
        "loss_scaling",
        "makes_a_vmap_agree",
    ),
    # --- _gradients -------------------------------------------------------------------
    Break(
        "the loss is not scaled",
        "_gradients",
        "return scaling.scale(loss), (",
        "return loss, (",
        "grad",
        "survive_thanks",
    ),
    Break(
        "the scaled loss is reported",
        "_gradients",
        "scaling.scale(loss), (loss, ",
        "scaling.scale(loss), (scaling.scale(loss), ",
        "grad",
        "reports_the_true_loss",
    ),
    Break(
        "gradients are unscaled by the next scale",
        "_gradients",
        "= scaling.unscale(result.grads)",
        "= scaling.adjust(True).unscale(result.grads)",
        "grad",
        "growth_step",
    ),
    Break(
        "an infinite loss skips nothing",
        "_gradients",
        "all_finite((grads, result.value))",
        "all_finite(grads)",
        "grad",
        "infinite_loss",
    ),
    Break(
        "a skipped step keeps its statistics",
        "_gradients",
        "after = select_tree(finite, result.state, before)",
        "after = result.state",
        "stateful",
        "skipped_step_rolls",
    ),
    Break(
        "gradients of 16-bit parameters are rounded",
        "_gradients",
        "call.widened(diff), scaled_loss",
        "diff, scaled_loss",
        "grad",
        "gradients_of_16_bit_parameters",
    ),
    Break(
        "gradients are not averaged over devices",
        "_gradients",
        "return together(x, axis_name)",
        "return x",
        "grad_sharded",
        "mapped_gradient",
    ),
    Break(
        "gradients are summed over devices in bf16",
        "_gradients",
        "cast_leaf(x, np.dtype(dtype or at_least_f32(x.dtype)))",
        "cast_leaf(x, jnp.dtype(jnp.bfloat16))",
        "grad_sharded",
        "mapped_gradient or reduce_dtype",
    ),
    Break(
        "one device decides by itself",
        "_gradients",
        "intact=all_devices(result.intact, axis_name)",
        "intact=result.intact",
        "grad_sharded",
        "state_spoilt",
    ),
    Break(
        "parts are added up instead of averaged",
        "_gradients",
        "lambda g: g / count",
        "lambda g: g",
        "accumulate",
        "that_of_the_large_batch",
    ),
    Break(
        "every part draws the same numbers",
        "_gradients",
        "jax.random.fold_in(key, index)",
        "key",
        "accumulate",
        "its_own_key",
    ),
    Break(
        "parts take blocks of rows",
        "_gradients",
        "x = jnp.swapaxes(x, 0, 1)",
        "x = jnp.reshape(x, (steps, shape[0] // steps, *shape[1:]))",
        "accumulate",
        "every_nth_row",
    ),
    # --- skips ------------------------------------------------------------------------
    Break(
        "no step is skipped",
        "_scaling",
        "select_tree(flag, after, before)",
        "select_tree(jnp.array(True), after, before)",
        "update",
        "skipped_step_changes",
    ),
    Break(
        "of many arrays of one type, the last are not checked",
        "_jax",
        "for i in range(0, len(group), count):",
        "for i in range(0, len(group), len(group)):",
        "tree",
        "arrays_of_one_type",
    ),
    Break(
        "updates are added in 16 bits",
        "_scaling",
        "wide = at_least_f32(param.dtype)",
        "wide = param.dtype",
        "update",
        "added_in_f32",
    ),
    Break(
        "an update that overflows is applied",
        "_scaling",
        "flag &= together(stays_finite(before, after, before[0]), flag, axis_name)",
        "pass",
        "update",
        "would_overflow",
    ),
    Break(
        "moments are not looked at",
        "_scaling",
        "for x in group[i::each]",
        "for x in group[i : i + 1]",
        "update",
        "checked_together",
    ),
    Break(
        "devices skip apart",
        "_scaling",
        "all_devices(flag, tuple(sorted(names))) if names else flag",
        "flag",
        "update",
        "devices_decide",
    ),
    # --- _quant -----------------------------------------------------------------------
    Break(
        "master weights are cut off, not rounded",
        "_quant",
        "pattern + (half + 0x8000)",
        "pattern + half",
        "quant_masters",
        "every_mantissa",
    ),
    Break(
        "first moments are decoded with another curve",
        "_quant",
        "254.0 - jnp.abs(q)",
        "255.0 - jnp.abs(q)",
        "quant",
        "first_moments_are_off",
    ),
    Break(
        "the last bits of a float are stored, which an assembler converts",
        "_quant",
        "return jnp.minimum(bits(x), np.int32(0x7FFFFFFE))",
        "return bits(x)",
        "quant",
        "low_bits",
    ),
    Break(
        "what is divided by a small number is coded",
        "_residuals",
        "Need(_UNLIKE) if is_rough(x) else Need(",
        "Need(_UNLIKE) if False else Need(",
        "amp_residual_ratios",
        "ratio or columns",
    ),
    Break(
        "second moments become zero",
        "_quant",
        "jnp.maximum(q, SHIFT + 1)",
        "",
        "quant",
        "roots_of_second",
    ),
    Break(
        "moments and masters are dithered together",
        "_quant",
        "multiple(0xB504F333)",
        "multiple(0x9E3779B1)",
        "quant",
        "do_not_fall_together",
    ),
    Break(
        "low words come first",
        "_optim",
        "in reversed(range(0, 8 * x.dtype.itemsize, width))",
        "in (range(0, 8 * x.dtype.itemsize, width))",
        "planes",
        "words_hold",
    ),
    Break(
        "elements of a matrix share their numbers",
        "_quant",
        "stride *= shape[axis]",
        "stride += shape[axis]",
        "quant",
        "elements_are_numbered",
    ),
    # --- _optim -----------------------------------------------------------------------
    Break(
        "steps of Muon do not depend on the shape",
        "_optim",
        "math.sqrt(max(1, columns / max(rows, 1)))",
        "1.0",
        "muon",
        "those_of_optax",
    ),
    Break(
        "Muon looks ahead with the bias of this step",
        "_optim",
        "_bias(beta, step + 1)",
        "_bias(beta, step)",
        "muon",
        "those_of_optax",
    ),
    Break(
        "the coefficients of Newton-Schulz steps are bf16",
        "_optim",
        "(a * x.astype(F32) + b * y.astype(F32)).astype(x.dtype)",
        "a * x + b * y",
        "muon",
        "follows_f64",
    ),
    Break(
        "devices return the matrices of others",
        "_jax",
        "(lax.all_gather(x, copies, tiled=True) if copies else x)[:count]",
        "(lax.all_gather(x, copies, tiled=True) if copies else x)[-count:]",
        "muon",
        "one_device",
    ),
    Break(
        "Adam does not correct its bias",
        "_optim",
        "rate * root / _bias(b1, step)",
        "rate * root",
        "flash",
        "rules_are_those",
    ),
    Break(
        "weight decay does not follow the learning rate",
        "_optim",
        '1 - hyper["learning_rate"] * decay',
        "1 - decay",
        "flash",
        "rules_are_those",
    ),
    Break(
        "Lion averages before it moves",
        "_optim",
        "(mu,) = old",
        "(mu,) = new",
        "flash",
        "rules_are_those",
    ),
    Break(
        "Nesterov is left out",
        "_optim",
        "step + momentum * mu if self.nesterov else mu",
        "mu",
        "flash",
        "rules_are_those",
    ),
    Break(
        "grad_scale is ignored",
        "_optim",
        "grad.astype(weight.dtype) * grad_scale",
        "grad.astype(weight.dtype)",
        "flash",
        "grad_scale_multiplies",
    ),
    Break(
        "a skipped step counts",
        "_optim",
        "jnp.where(finite, count, old.count)",
        "count",
        "flash",
        "not_finite_changes_no_byte",
    ),
    Break(
        "norms are summed in the dtype of gradients",
        "_optim",
        "part.astype(jnp.float32) * scale",
        "part * scale.astype(part.dtype)",
        "flash_clip",
        "",
    ),
    Break(
        "nothing is clipped",
        "_optim",
        "jnp.where(norm > limit, limit / norm, 1.0)",
        "1.0",
        "flash_clip",
        "",
    ),
    Break(
        "master_params returns the rounded ones",
        "_optim",
        "codec.decode(jnp.asarray(self.param), numbers[CORRECTION], Block())",
        "jnp.asarray(self.param).astype(jnp.float32)",
        "flash",
        "master_weights_go_in",
    ),
    Break(
        "release steps with gradients that are not finite",
        "_optim",
        "finite = _both(finite, watched.see(grad))",
        "watched.see(grad)",
        "release",
        "finite",
    ),
    # --- _kernels ---------------------------------------------------------------------
    Break(
        "plain steps ignore the flag",
        "_kernels",
        "jnp.where(finite, x, y), new, old",
        "x, new, old",
        "flash",
        "not_finite_changes_no_byte",
    ),
    Break(
        "kernels ignore the flag",
        "_kernels",
        "(which == number) & (finite != 0) & is_here",
        "(which == number) & is_here",
        "kernels",
        "",
    ),
    Break(
        "kernels write to the first leaf",
        "_kernels",
        "(which == number) & (finite != 0)",
        "(number == 0) & (finite != 0)",
        "kernels",
        "",
    ),
    # --- _wire ------------------------------------------------------------------------
    Break(
        "weight gradients are sent in 16 bits",
        "_wire",
        "self._low(call, [*known, cotangent], self.grads[side])",
        "self._low(call, [*known, cotangent], self.compute)",
        "wire",
        "",
    ),
    # --- _ops -------------------------------------------------------------------------
    Break(
        "labels are added to the gradient of logits",
        "_ops",
        "for_sum * p + jnp.where(is_label, for_chosen, 0.0)",
        "for_sum * p - jnp.where(is_label, for_chosen, 0.0)",
        "cross_entropy",
        "",
    ),
    Break(
        "chunks have maxima of their own",
        "_ops",
        "sums[0] * jnp.exp(highest - shift[..., 0])",
        "sums[0]",
        "cross_entropy",
        "",
    ),
    Break(
        "the soft cap has no derivative",
        "_ops",
        "slope = 1 - jnp.square(z / head.soft_cap)",
        "slope = 1.0",
        "cross_entropy",
        "textbook",
    ),
    Break(
        "padding reaches the gradient of the head",
        "_ops",
        "dz = jnp.where(is_read, dz, 0.0)",
        "",
        "cross_entropy",
        "",
    ),
    Break(
        "groups end one row late",
        "_ops",
        "index[:, None] >= last[None]",
        "index[:, None] > last[None]",
        "experts",
        "",
    ),
    Break(
        "the gradient of experts is transposed",
        "_ops",
        '("rows", True), ("sums", True)',
        '("rows", True), ("sums", False)',
        "experts",
        "second_derivatives",
    ),
    Break(
        "scores stay where the bias of a row hides them",
        "_ops",
        "jnp.abs(highest) >= _ABSORBING",
        "jnp.isnan(highest)",
        "amp_attention",
        "rounding_of_a_bias",
    ),
    Break(
        "keys get no gradient from rows that a bias hides",
        "_ops",
        "jnp.where(is_lost, lax.stop_gradient(query), 0)",
        "jnp.zeros_like(query)",
        "amp_attention",
        "rounding_of_a_bias",
    ),
    Break(
        "no bias hides rows",
        "_amp",
        "any(map(is_low, values)) or not all(is_made)",
        "False",
        "amp_attention",
        "twice_the_size",
    ),
    Break(
        "the mask of attention is ignored",
        "_ops",
        '"is_causal": spec.is_causal, **extras}',
        '"is_causal": spec.is_causal, **extras, "mask": None}',
        "amp_attention",
        "",
    ),
    # --- checkpoint -------------------------------------------------------------------
    Break(
        "copies of a shard count twice",
        "checkpoint",
        "if shard.replica_id == 0",
        "if True",
        "checkpoint",
        "same_for_every_sharding",
    ),
    Break(
        "damaged arrays are accepted",
        "checkpoint",
        "if found != saved[name].value",
        "if False",
        "checkpoint",
        "damaged_file or checksum",
    ),
    Break(
        "to_f32 returns the rounded parameters",
        "checkpoint",
        "weights, new = kept.master, kept.inner_state",
        "weights, new = params, kept.inner_state",
        "checkpoint",
        "taken_off",
    ),
    # --- compat -----------------------------------------------------------------------
    Break(
        "the overflow of jaxamp goes unseen",
        "compat",
        "check_fn=lambda results: results[1]",
        "check_fn=lambda results: ()",
        "compat_jaxamp",
        "one_bad_gradient",
    ),
    Break(
        "the floor of jmp is forgotten",
        "compat",
        "max(floor, tiny)",
        "tiny",
        "compat_jmp",
        "min_loss_scale or documented_algorithm or infinity_nor_zero",
    ),
    Break(
        "groups of FlashOptim are cut along the last axis",
        "compat",
        "jnp.pad(x.reshape(-1), (0, -x.size % group_size))",
        "jnp.pad(x.reshape(-1), (-x.size % group_size, 0))",
        "compat_flashoptim",
        "original",
    ),
    # --- _jax -------------------------------------------------------------------------
    Break(
        "one device is enough",
        "_jax",
        "lax.pmin(flag.astype(jnp.int32), axis_name)",
        "lax.pmax(flag.astype(jnp.int32), axis_name)",
        "tree",
        "axis_name_gives",
    ),
    Break(
        "attention of few tokens runs in cuDNN",
        "_ops",
        "min(rows, keys) < _SIDE",
        "min(rows, keys) < 0",
        "recognition",
        "pays",
    ),
    Break(
        "the last array is not looked at",
        "_jax",
        "== len(checks)",
        ">= len(checks) - 1",
        "tree",
        "one_bad_number",
    ),
    Break(
        "states are made on one device",
        "_jax",
        "device=sharding if placed else None",
        "device=None",
        "flash_sharded",
        "every_array_of_the_state",
    ),
    Break(
        "groups are cut between devices",
        "_jax",
        "if shape[-1] // group % shards == 0:",
        "if True:",
        "flash_sharded",
        "cut",
    ),
    # --- _amp --------------------------------------------------------------------------
    Break(
        "a sum counts as a number of 16 bits",
        "_amp",
        "if name in _SUMS:",
        "if False:",
        "amp_regions",
        "only_numbers_of_16",
    ),
    Break(
        "what f16 may not hold is stored in it",
        "_amp",
        "is_far = rule == Rule.F32 and",
        "is_far = False and",
        "amp_rules",
        "f16 or exp or square",
    ),
    Break(
        "amp_stop is ignored",
        "_amp",
        'STOP_SCOPE: "scope amp_stop", ',
        "",
        "amp_rules",
        "stop",
    ),
    # --- _program ----------------------------------------------------------------------
    Break(
        "the carry of a scan has another dtype",
        "_program",
        "    carry = cast_all(carry, dtypes)\n",
        "",
        "amp_rules",
        "carry",
    ),
    # --- recognised attention ----------------------------------------------------------
    Break(
        "causal masks are dropped",
        "_amp",
        "match.scores.scale, masks.is_causal,",
        "match.scores.scale, False,",
        "recognition",
        "by_hand",
    ),
    Break(
        "weights that are used elsewhere are not computed",
        "_amp",
        "used = [index for index in replaced if inside[index] & live]",
        "used = []",
        "recognition",
        "",
    ),
    # --- _fp8 --------------------------------------------------------------------------
    Break(
        "fp8 enters custom derivatives",
        "_fp8",
        "self._is_open &= _may_enter(eqn)",
        "pass",
        "fp8_amp",
        "custom",
    ),
    Break(
        "fp8 takes a learnt query for a weight",
        "_amp",
        "if before.size != after.size:",
        "if False:",
        "fp8_amp",
        "each_example",
    ),
    Break(
        "scales are too small by a factor of two",
        "_fp8",
        "np.int32(exponent - 1) + above",
        "np.int32(exponent - 1)",
        "fp8_scales",
        "",
    ),
    Break(
        "delayed scales overflow",
        "_fp8",
        "_cast(x, jnp.clip(x, -largest, largest), form)",
        "_cast(x, x, form)",
        "fp8_scales",
        "",
    ),
    Break(
        "an overflow becomes a number",
        "_fp8",
        "jnp.where(jnp.abs(x) < jnp.inf, clipped, jnp.nan).astype",
        "clipped.astype",
        "fp8_scales",
        "inf_and_nan",
    ),
    Break(
        "the newest maximum is forgotten",
        "_fp8",
        "history[..., :-1, :]], axis=-2)",
        "history[..., :-1, :]], axis=-2)[..., ::-1, :]",
        "fp8_delayed",
        "",
    ),
    Break(
        "a maximum that is not finite stays",
        "_fp8",
        "jnp.where(jnp.isfinite(new) & (new > 0), new, last)",
        "new",
        "fp8_delayed",
        "",
    ),
    Break(
        "scales of rows stay behind when a gathered weight is transposed",
        "_fp8",
        "lax.transpose(x.scale, order) if x.scale.ndim else x.scale",
        "x.scale",
        "fp8_int8",
        "gathered",
    ),
    Break(
        "gradients in int8 are rounded to nearest",
        "_fp8",
        "jnp.floor(x + noise)",
        "jnp.round(x)",
        "fp8_int8",
        "on_average",
    ),
    Break(
        "an overflow becomes an integer",
        "_fp8",
        "return jnp.maximum(amax * np.float32(1 / _INT8_MAX), TINY)",
        "return jnp.nan_to_num(jnp.maximum(amax / 127, TINY))",
        "fp8_int8",
        "inf_and_nan",
    ),
    Break(
        "sums of int8 exceed s32",
        "_fp8",
        "or size > recipe.longest:",
        "or False:",
        "fp8_int8",
        "kept_for_its_size",
    ),
    Break(
        "gradients in NVFP4 are clipped",
        "_fp8",
        "to_e4m3(scale, up=dithered)",
        "to_e4m3(scale, up=False)",
        "fp8_nvfp4",
        "on_average",
    ),
    Break(
        "only one operand of a weight's gradient is rotated",
        "_fp8",
        '(("activation", 1), ("grad", spec.weight_side))',
        '(("activation", 1),)',
        "fp8_nvfp4",
        "products",
    ),
    Break(
        "the weight of NVFP4 has blocks of one row",
        "_fp8",
        'recipe.weight_blocks == "2d"',
        "False",
        "fp8_nvfp4",
        "same_weight",
    ),
    # --- residuals ---------------------------------------------------------------------
    Break(
        "the sum of a softmax is taken for a mean",
        "_amp",
        'if name == "div" and position == 0 and reader.invars[1].aval.size == 1:',
        'if name == "div":',
        "amp_hints",
        "apart_in_both_passes",
    ),
    Break(
        "a block with an inf keeps its peak",
        "_residuals",
        "(peak + 0 * peak).astype(x.dtype)",
        "peak.astype(x.dtype)",
        "amp_residuals",
        "becomes_nan",
    ),
    Break(
        "a product with exchanged operands keeps their axes",
        "_amp",
        "return jnp.moveaxis(x, -1, 0)",
        "return x if len({*x.shape}) < x.ndim else jnp.moveaxis(x, -1, 0)",
        "amp_hints",
        "outputs_of_a_mapped_layer",
    ),
    Break(
        "an activation is computed again for each row and column of codes",
        "_fp8",
        "x, one = lax.optimization_barrier(x), jnp.ones((), jnp.float32)",
        "one = jnp.ones((), jnp.float32)",
        "fp8_int8",
        "written_once",
    ),
    Break(
        "any sum of a number and tanh becomes 1 + tanh",
        "_amp",
        "found[0] if numbers == [1] else None",
        "found[0] if numbers else None",
        "amp_hints",
        "other_uses_of_tanh",
    ),
    Break(
        "the tail of erfc is not turned for negative numbers",
        "_ops",
        "jnp.where(x < 0, 2 - tail, tail)",
        "tail",
        "amp_hints",
        "erfc",
    ),
    Break(
        "small positive numbers become 0, and relu's derivative with them",
        "_residuals",
        "jnp.sign(numbers) * jnp.maximum(jnp.abs(numbers), smallest)",
        "numbers * 1.0",
        "amp_residuals",
        "signs_of_the_numbers",
    ),
    Break(
        "parameters are coded",
        "_residuals",
        "is_listed &= not self.facts[root].is_param",
        "",
        "amp_residuals",
        "computed_from_others",
    ),
    Break(
        "a derivative divides by 8-bit codes",
        "_residuals",
        'like = [Need(f"`{name}` reads it")] * len(reads)',
        "like = [Need()] * len(reads)",
        "amp_residual_ratios",
        "int8",
    ),
    Break(
        "a difference is computed from codes of its terms",
        "_residuals",
        'is_sum = BEARS.get(name) == "sums" and not self._is_safe(eqn, reads)',
        "is_sum = False",
        "amp_residual_readers",
        "regression",
    ),
    Break(
        "max pooling compares codes",
        "_residuals",
        'exact = Need(f"`{name}` reads it")',
        "exact = Need()",
        "amp_residuals",
        "order_of_numbers",
    ),
    Break(
        "a bound that is written is rounded",
        "_amp",
        "is_cut = name not in _NEW and",
        "is_cut = False and",
        "amp_regions",
        "only_numbers_of_16",
    ),
    Break(
        "a carry is rounded at each step",
        "_amp",
        "return (False,) * carry + (True,)",
        "return (True,) * carry + (True,)",
        "amp_regions",
        "a_carry_is",
    ),
    Break(
        "cotangents are rounded before they add up",
        "_amp",
        "is_shared = any(i not in inside for i in amp.frame.layout.reading(var))",
        "is_shared = False",
        "amp_regions",
        "many_readers",
    ),
    Break(
        "reading what depends on no floats parts regions",
        "_amp",
        "            if i in self.live:\n                atoms",
        "            if False:\n                atoms",
        "spec",
        "wrong_once",
    ),
    Break(
        "a bias without a batch is repeated in 16 bits",
        "_ops",
        "first[1] = zeros + lax.expand_dims(bias, [0])",
        "first[1] = zeros + load(lax.full_like(zeros, 0, x.dtype) + bias[None].astype(x.dtype))",
        "stored",
        "bias_sums",
    ),
    Break(
        "subnormal numbers of f16 are loaded as normal ones",
        "_ops",
        "jnp.where(size < 0x400, tiny, normal)",
        "normal",
        "stored",
        "bit_by_bit",
    ),
    Break(
        "a loaded number's cotangent may stay f32",
        "_ops",
        "return [lax.optimization_barrier(low) if name == LOAD else low]",
        "return [low]",
        "stored",
        "barrier",
    ),
    Break(
        "a contraction of four runs in 16 bits",
        "_amp",
        "summed <= _FEW",
        "summed < 1",
        "amp_regions",
        "contraction",
    ),
    Break(
        "a product of masks is rounded",
        "_amp",
        "if facts and all([x.is_count for x in facts[:2]]):",
        "if False:",
        "amp_long_sums",
        "masks_count",
    ),
    Break(
        "a sum over the examples of a vmap is in 16 bits",
        "_amp",
        'if name == "psum" and not',
        'if name == "nothing" and not',
        "amp_long_sums",
        "vmap",
    ),
    Break(
        "the frozen part of a model is data",
        "_program",
        "is_part = all(x is None or y is None for x, y in pairs)",
        "is_part = False",
        "amp_params",
        "frozen or partitioned",
    ),
    Break(
        "a writer does not see another one of its process",
        "checkpoint",
        "return _writing.get(str(self._path)) is self._manager",
        "return str(self._path) in _writing",
        "checkpoint",
        "two_writers",
    ),
    Break(
        "the sine of a code is taken for smooth",
        "_residuals",
        'names("tanh logistic erf erfc one_minus_square square")',
        'names("tanh logistic erf erfc one_minus_square square sin cos")',
        "amp_residual_readers",
        "siren",
    ),
    # --- inspect -----------------------------------------------------------------------
    Break(
        "explain clips in f32",
        "inspect",
        'in ("mpx_round", "mpx_clip")',
        'in ("mpx_round",)',
        "explain",
        "fixed_scale_clips",
    ),
    Break(
        "explain rounds codes between the passes in f32",
        "inspect",
        "is_same = _is_bytes(eqn) and is_float(args[0])",
        "is_same = False",
        "explain",
        "earlier_steps_clips",
    ),
    Break(
        "what int8 rounds is no matmul",
        "inspect",
        "parts = matmul_of(node, blame.nodes)",
        "parts = [node]",
        "explain",
        "int8",
    ),
    Break(
        "scales of fp8 are promotions",
        "inspect",
        "is_own = FP8_SCOPE in here.scopes",
        "is_own = False",
        "report",
        "scales_and_roundings",
    ),
    Break(
        "explain rounds to int8 in f32",
        "inspect",
        '== "reduce_precision" or is_rounding(eqn):',
        '== "reduce_precision":',
        "fp8_int8",
        "cannot_hold",
    ),
    Break(
        "zeros count as small numbers",
        "inspect",
        "index = jnp.where(magnitude == 0, ZERO, index)",
        "",
        "exponents",
        "",
    ),
    Break(
        "counts lose their carry",
        "inspect",
        "high + carry",
        "high",
        "exponents",
        "",
    ),
]


def find(item: Break, src: pathlib.Path = SRC) -> pathlib.Path:
    """Returns the file of a break.

    Raises:
        LookupError: If its text does not occur exactly once in its room.
    """
    files = sorted((src / item.room).rglob("*.py"))
    counts = {path: path.read_text().count(item.old) for path in files}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        where = ", ".join(str(path.relative_to(src)) for path in found) or "no file"
        raise LookupError(
            f"{item.room}: {item.name!r}: the text occurs {sum(counts.values())} times, "
            f"in {where}: {item.old!r}"
        )
    return found[0]


def missing(breaks: Sequence[Break]) -> list[str]:
    """Returns what is wrong with the texts and the tests of breaks."""
    problems = []
    for item in breaks:
        try:
            find(item)
        except LookupError as error:
            problems.append(str(error))
        if not (ROOT / "tests" / f"test_{item.test}.py").is_file():
            problems.append(f"{item.name!r}: no tests/test_{item.test}.py")
    return problems


SKIPPED = "its tests are skipped on this JAX"


def survives(item: Break) -> str | None:
    """Applies a break to a copy of the package; returns what is wrong if not a red test."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/test_{item.test}.py", "--no-header", "--tb=no"]
    command += ["-m", "not gpu_compile"]  # with what is slow
    command += ["-k", item.select] if item.select else []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        shutil.copytree(SRC, copy / "mpx", ignore=shutil.ignore_patterns("__pycache__"))
        path = find(item, copy / "mpx")
        path.write_text(path.read_text().replace(item.old, item.new))
        # Before those of the caller, and before an editable installation.
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        code = "import mpx; print(mpx.__file__)"
        where = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        ).stdout
        assert where.startswith(folder), f"the tests would import {where}"
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True
        )
    if done.returncode == 1:
        return None
    if done.returncode == 0:
        return "survives" if " passed" in done.stdout else SKIPPED
    return f"pytest exits with {done.returncode}: {done.stdout[-500:]}"


def run(breaks: Sequence[Break], jobs: int) -> int:
    """Tries breaks, some at a time; returns how many were not found by their test."""
    failed, skipped = [], 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(survives, item): item for item in breaks}
        done = concurrent.futures.as_completed(waiting)
        for number, future in enumerate(done, start=1):
            item, problem = waiting[future], future.result()
            failed += [item] if problem not in (None, SKIPPED) else []
            skipped += problem == SKIPPED
            place = f"[{number}/{len(breaks)}] {item.room}: {item.name}"
            print(f"{place}: {problem or 'red'}", flush=True)
    found, tried = len(breaks) - len(failed) - skipped, len(breaks) - skipped
    print(
        f"{found} of {tried} breaks are found by their tests, {skipped} need another JAX"
    )
    for item in failed:
        print(f"  not found: {item.room}: {item.name} (tests/test_{item.test}.py)")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="those with this in their names")
    parser.add_argument("--room", help="those of one package, such as _optim")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    given = parser.parse_args()
    chosen = [
        item
        for item in BREAKS
        if (given.only is None or given.only in item.name)
        and (given.room is None or given.room == item.room)
    ]
    if not chosen:
        parser.error("no break has such a name or room")
    if problems := missing(chosen):
        print("\n".join(problems))
        return 1
    return 0 if given.check else int(run(chosen, given.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
