"""Small models from other people's packages, as losses of parameters and a batch.

One file for each family of libraries. `REGISTRY` lists the models by name, without
importing their packages: a model's function does that when it is called.
"""

from _zoo import (
    decoder,
    equinox_family,
    flax_family,
    haiku_family,
    huggingface,
    keras_family,
    methods,
    probabilistic,
    science,
)
from _zoo.model import Case as Case
from _zoo.model import Model as Model

REGISTRY: dict[str, Model] = {
    model.name: model
    for family in (
        huggingface,
        keras_family,
        flax_family,
        decoder,
        equinox_family,
        haiku_family,
        science,
        probabilistic,
        methods,
    )
    for model in family.MODELS
}
