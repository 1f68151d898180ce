"""Small models from other people's packages, as losses of parameters and a batch.

One file for each family of libraries. `REGISTRY` lists the models by name, in the order
of these imports and without importing their packages: a model's function does that.
"""

from _zoo import huggingface, flax_family, equinox_family, haiku_family, others  # noqa: F401, I001
from _zoo.model import REGISTRY as REGISTRY
from _zoo.model import Case as Case
