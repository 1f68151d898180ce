"""Gradients in fp8 are not differentiated again: that raises.

An 8-bit code is a constant to JAX, so the second derivatives would be 0; and those of MX
blocks would be rounded with scales that were made for other numbers.
"""

from mpx._grad_checks import undifferentiable

# For what the rules of a derivative get or return: JAX evaluates these rules on values, and
# differentiating them is a second derivative.
differentiable_once = undifferentiable(
    "fp8 has no second derivatives; take them of the function without fp8. If the "
    "gradient is a constant here, pass its arguments through `lax.stop_gradient`."
)
