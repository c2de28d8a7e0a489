"""Files of each data set: names, sizes, checksums and download addresses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One published file."""

    name: str
    size: int
    """In bytes."""
    checksum: str
    """``md5:…`` or ``sha256:…``, as pooch writes it."""
    or_gzipped: bool = False
    """Whether `name`.gz is accepted too; size and checksum are those of its content."""

    def __str__(self) -> str:
        return f"{self.name}  {self.size:,} bytes  {self.checksum.replace(':', ' ')}"


@dataclass(frozen=True)
class DataSet:
    """The files of one data set."""

    folder: str
    """Subfolder of the data folder."""
    files: tuple[File, ...]
    mirrors: tuple[str, ...]
    """Addresses to which a file's name is appended, tried in this order."""
    archive: File | None = None
    """A single download that contains all files, as `folder`/name."""


DATA_SETS = {
    "cifar10": DataSet(
        folder="cifar-10-batches-py",
        files=(
            File("data_batch_1", 31_035_704, "md5:c99cafc152244af753f735de768cd75f"),
            File("data_batch_2", 31_035_320, "md5:d4bba439e000b95fd0a9bffe97cbabec"),
            File("data_batch_3", 31_035_999, "md5:54ebc095f3ab1f0389bbae665268c751"),
            File("data_batch_4", 31_035_696, "md5:634d18415352ddfa80567beed471001a"),
            File("data_batch_5", 31_035_623, "md5:482c414d41f54cd18b22e5b47cb7c3cb"),
            File("test_batch", 31_035_526, "md5:40351d587109b95175f43aff81a1287e"),
            File("batches.meta", 158, "md5:5ff9c542aee3614f3951f8cda6e48888"),
        ),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        archive=File("cifar-10-python.tar.gz", 170_498_071, "md5:c58f30108f718f92721af3b95e74349a"),
    ),
    "mnist": DataSet(
        folder="mnist",
        files=(
            File("train-images-idx3-ubyte.gz", 9_912_422, "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            File("train-labels-idx1-ubyte.gz", 28_881, "md5:d53e105ee54ea40749a09fcbcd1e9432"),
            File("t10k-images-idx3-ubyte.gz", 1_648_877, "md5:9fb629c4189551a2d022fa330f9573f3"),
            File("t10k-labels-idx1-ubyte.gz", 4_542, "md5:ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "binarized-mnist": DataSet(
        folder="binarized-mnist",
        files=(
            File(
                "binarized_mnist_train.amat",
                78_400_000,
                "sha256:ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d",
                or_gzipped=True,
            ),
            File(
                "binarized_mnist_valid.amat",
                15_680_000,
                "sha256:1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2",
                or_gzipped=True,
            ),
            File(
                "binarized_mnist_test.amat",
                15_680_000,
                "sha256:e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c",
                or_gzipped=True,
            ),
        ),
        mirrors=(
            "https://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",
            "http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",
        ),
    ),
}
