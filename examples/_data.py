"""Real images for the demo: scikit-learn's digits, CIFAR-10, MNIST, Fashion-MNIST."""

import dataclasses
import functools
import gzip
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Reader = Callable[[], bytes]
Files = dict[str, Reader]
Split = tuple[NDArray[np.uint8], NDArray[np.int32]]

EXPECTED = (
    "Expected a folder, or a .tar, .tar.gz or .tgz file, with either CIFAR-10 "
    "(`data_batch_1` ... `data_batch_5` and `test_batch`, or the same with `.bin` or "
    "`.png`) or MNIST or Fashion-MNIST (`train-images-idx3-ubyte`, "
    "`train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, "
    "plain or .gz)."
)


class DataError(Exception):
    """The data path is missing or does not hold what it should."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images as bytes (height × width × channels) and labels, train and test."""

    name: str
    train: Split
    test: Split
    classes: int = 10

    def __post_init__(self) -> None:
        for images, labels in (self.train, self.test):
            if len(images) != len(labels) or not len(labels):
                raise DataError(
                    f"{self.name} has {len(images)} images but {len(labels)} labels; "
                    "these files do not belong together. Fetch the data again."
                )
            if not 0 <= labels.min() <= labels.max() < self.classes:
                raise DataError(
                    f"{self.name} has labels from {labels.min()} to {labels.max()}, "
                    f"expected 0 to {self.classes - 1}. Fetch the data again."
                )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of one image."""
        _, height, width, channels = self.train[0].shape
        return height, width, channels

    @functools.cached_property
    def _mean_and_std(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        some = self.train[0][:10_000].astype(np.float32)
        return some.mean((0, 1, 2)), some.std((0, 1, 2)) + 1e-6

    def normalised(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images in f32, shifted and scaled to mean 0 and deviation 1 per channel."""
        mean, std = self._mean_and_std
        return (images - mean) / std

    def batches(
        self, size: int, steps: int, seed: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """Random batches of the training set; the same seed gives the same ones."""
        images, labels = self.train
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            pick = rng.integers(len(labels), size=size)
            yield self.normalised(images[pick]), labels[pick]


def load_digits() -> Dataset:
    """The 1,797 handwritten 8×8 digits that come inside scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]
    return Dataset(
        "digits", (images[train], labels[train]), (images[test], labels[test])
    )


def load(path: Path) -> Dataset:
    """CIFAR-10, MNIST or Fashion-MNIST from a folder or an archive.

    Raises:
        DataError: If nothing is there, or if it is not complete.
    """
    files = _files(path)
    if "data_batch_1" in files:
        return _cifar10(files, "", _cifar10_pickle)
    if "data_batch_1.bin" in files:
        return _cifar10(files, ".bin", _cifar10_binary)
    if "data_batch_1.png" in files:
        return _cifar10(files, ".png", _cifar10_tiles)
    if "train-images-idx3-ubyte" in files:
        return _mnist(files)
    found = ", ".join(sorted(files)[:5]) or "nothing"
    raise DataError(f"No data set found in {path}: it holds {found}. {EXPECTED}")


def _files(path: Path) -> Files:
    """Returns the files of a folder or an archive, by name without .gz."""
    if path.is_file() and _plain(path.name).startswith(_PARTS):
        path = path.parent  # one file of the set stands for all of them
    if path.is_dir():
        paths = [p for p in (*path.glob("*/*"), *path.glob("*")) if p.is_file()]
        readers: Files = {p.name: p.read_bytes for p in paths}
    elif path.is_file():
        readers = _members(path)
    else:
        raise DataError(f"No such file or folder: {path}. {EXPECTED}")
    return {
        _plain(name): _unzipped(name, read) if name.endswith(".gz") else read
        for name, read in readers.items()
    }


_PARTS = ("data_batch_", "test_batch", "train-", "t10k-")


def _plain(name: str) -> str:
    """`train-images-idx3-ubyte` for `train-images.idx3-ubyte.gz`: both are in use."""
    return name.removesuffix(".gz").replace(".idx", "-idx")


def _members(path: Path) -> Files:
    """The files in an archive, read into memory in one pass."""
    try:
        with tarfile.open(path) as archive:
            blobs = {
                Path(member.name).name: stream.read()
                for member in archive
                if (stream := archive.extractfile(member)) is not None
            }
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete .tar or .tar.gz file ({error}). {EXPECTED}"
        ) from error
    return {name: lambda blob=blob: blob for name, blob in blobs.items()}


def _unzipped(name: str, read: Reader) -> Reader:
    def unzip() -> bytes:
        try:
            return gzip.decompress(read())
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{name} is not a complete gzip file ({error}). Fetch it again."
            ) from error

    return unzip


def _read(files: Files, name: str) -> bytes:
    if name not in files:
        raise DataError(f"The file {name} is missing beside the others. {EXPECTED}")
    return files[name]()


def _cifar10(
    files: Files, suffix: str, parse: Callable[[Files, str], Split]
) -> Dataset:
    def part(name: str) -> Split:
        return parse(files, name + suffix)

    images, labels = zip(*(part(f"data_batch_{i}") for i in range(1, 6)), strict=True)
    train = np.concatenate(images), np.concatenate(labels)
    return Dataset("CIFAR-10", train, part("test_batch"))


def _cifar10_images(name: str, planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of 3 colour planes of 32×32 to height × width × channels."""
    if planes.ndim != 2 or planes.shape[1] != 3072:
        raise DataError(
            f"{name} holds an array of shape {planes.shape}, expected (n, 3072). "
            "Fetch CIFAR-10 again (CIFAR-100 will not do)."
        )
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _cifar10_binary(files: Files, name: str) -> Split:
    """Records of one label byte and 3,072 pixel bytes."""
    blob = _read(files, name)
    if not blob or len(blob) % 3073:
        raise DataError(
            f"{name} has {len(blob):,} bytes, expected a multiple of 3,073 (a label "
            "and 3,072 pixels each): the file is cut off. Fetch it again."
        )
    records = np.frombuffer(blob, np.uint8).reshape(-1, 3073)
    return _cifar10_images(name, records[:, 1:]), records[:, 0].astype(np.int32)


def _cifar10_tiles(files: Files, name: str) -> Split:
    """One PNG, an image in each row of 1,024 pixels; labels in two JSON files."""
    from PIL import Image, UnidentifiedImageError

    try:
        pixels = np.asarray(Image.open(io.BytesIO(_read(files, name))).convert("RGB"))
        # The package that has these files spells it so.
        which = "test" if name.startswith("test") else "train"
        labels = np.asarray(json.loads(_read(files, f"{which}_lables.json")), np.int32)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise DataError(f"{name} or its labels cannot be read ({error}).") from error
    if pixels.shape[1] != 1024:
        raise DataError(f"{name} is {pixels.shape[1]} pixels wide, expected 1,024.")
    if which == "train":
        start = (int(name.removesuffix(".png")[-1]) - 1) * len(pixels)
        labels = labels[start : start + len(pixels)]
    return pixels.reshape(-1, 32, 32, 3), labels


def _cifar10_pickle(files: Files, name: str) -> Split:
    """A pickled dictionary with `data` and `labels`."""
    blob = _read(files, name)
    try:
        batch = _ArrayUnpickler(io.BytesIO(blob), encoding="bytes").load()
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        planes = np.asarray(batch["data"], np.uint8)
        labels = np.asarray(batch["labels"], np.int32)
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{name} is not a complete pickle of CIFAR-10 with `data` and `labels` "
            f"({type(error).__name__}: {error}). Fetch it again."
        ) from error
    return _cifar10_images(name, planes), labels


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and nothing else: a pickle can otherwise run any code."""

    def find_class(self, module_name: str, global_name: str) -> object:
        if (module_name, global_name) == ("numpy", "dtype"):
            # Python 2 wrote 0 and 1 for the flags, which NumPy 2.4 warns about.
            return lambda name, *flags: np.dtype(name)
        module_name = module_name.replace("numpy.core", "numpy._core")
        if (module_name, global_name) in _ARRAY_PARTS:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"refused to load {module_name}.{global_name}")


_ARRAY_PARTS = {
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}


def _mnist(files: Files) -> Dataset:
    def part(prefix: str) -> Split:
        images = _idx(files, f"{prefix}-images-idx3-ubyte", 3)
        labels = _idx(files, f"{prefix}-labels-idx1-ubyte", 1)
        return images[..., None], labels.astype(np.int32)

    return Dataset("MNIST or Fashion-MNIST", part("train"), part("t10k"))


def _idx(files: Files, name: str, rank: int) -> NDArray[np.uint8]:
    """An IDX file: 0, 0, 8 (bytes), rank, the big-endian sizes, the values."""
    blob = _read(files, name)
    header = 4 + 4 * rank
    if len(blob) < header or blob[:4] != bytes((0, 0, 8, rank)):
        raise DataError(
            f"{name} starts with the bytes {blob[:4].hex(' ') or 'of an empty file'}, "
            f"expected 00 00 08 {rank:02x} (IDX, bytes, rank {rank}). Fetch it again."
        )
    shape = tuple(np.frombuffer(blob, ">u4", rank, offset=4).tolist())
    values = np.frombuffer(blob, np.uint8, offset=header)
    if values.size != np.prod(shape):
        raise DataError(
            f"{name} promises {np.prod(shape):,} values {shape} but holds "
            f"{values.size:,}: the file is cut off. Fetch it again."
        )
    return values.reshape(shape)
