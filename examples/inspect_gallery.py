"""Makes the pictures of the page "Watching a run" from a short run of the demo's model.

python examples/inspect_gallery.py                # into docs/images
python examples/inspect_gallery.py --out out
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from _data import load_digits
from _gallery import draw, sparklines, watched_run
from _vit import ViT
from digits import PRESETS, loss_fn

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, draws, and prints where the pictures are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args(argv)
    preset, data = PRESETS["digits"], load_digits()
    model = ViT(preset.size, data.image_shape, data.classes, key=jax.random.key(0))
    batches = data.batches(preset.batch, arguments.steps, seed=0)
    recorder = watched_run(loss_fn, model, batches, lr=1e-3)
    for name, path in draw(recorder, arguments.out).items():
        print(f"{name}: {path}")
    print(f"\n{sparklines(recorder)}\n\n{recorder.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
