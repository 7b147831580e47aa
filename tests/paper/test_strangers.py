"""Files from strangers: nothing in them is run, nothing is written, and a few bytes do not fill the memory."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kronscope.errors import DataError, KronscopeError, ModelError
from kronscope.paper import data
from kronscope.runs.contents import Checkpoint, Checkpoints
from kronscope.targets import load_data, load_model
from tests.paper.test_files import _binary, _cifar_batches, _idx, _jpeg

Make = Callable[[Path], Any]


class Marker:
    """What makes a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def network() -> nn.Module:
    return nn.Linear(3, 2)


def test_the_marker_works(marker: Path) -> None:
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()


# ---------------------------------------------------------------------- nothing is run


def _python_batches(place: Path, content: bytes) -> None:
    for number in range(1, 6):
        (place / f"data_batch_{number}").write_bytes(content)


def _archive(place: Path, content: bytes) -> None:
    with tarfile.open(place / "cifar-10-python.tar.gz", "w:gz") as tar:
        for number in range(1, 6):
            info = tarfile.TarInfo(f"cifar-10-batches-py/data_batch_{number}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _pickles(marker: Path) -> Iterator[bytes]:
    for protocol in range(6):
        yield pickle.dumps({b"data": Marker(marker), b"labels": [1]}, protocol)
        yield pickle.dumps(Marker(marker), protocol)
        yield pickle.dumps({b"data": np.array([Marker(marker)], dtype=object), b"labels": [1]}, protocol)


@pytest.mark.parametrize("write", [_python_batches, _archive])
def test_cifar10(place: Path, marker: Path, write: Callable[[Path, bytes], None]) -> None:
    for content in _pickles(marker):
        write(place, content)
        for verify in (True, False):
            with pytest.raises(DataError):
                data.load("cifar-10", place, verify=verify)
        assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "file", "keys"),
    [("cifar-5m", "cifar5m_part0.npz", "XY"), ("imagenet-sample", "imagenet1k_sample.npz", "xy")],
)
def test_npz_of_objects(place: Path, marker: Path, name: str, file: str, keys: str) -> None:
    hostile = np.array([Marker(marker)], dtype=object)
    np.savez(place / file, **dict.fromkeys(keys, hostile))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="in a form this data set does not use"):
        data.load(name, place)
    # a pickle instead of an array
    with zipfile.ZipFile(place / file, "w") as archive:
        for key in keys:
            archive.writestr(f"{key}.npy", pickle.dumps(Marker(marker)))
    with pytest.raises(DataError, match="Could not read"):
        data.load(name, place)
    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_data_and_checkpoints_of_the_command_line(tmp_path: Path, marker: Path, zipped: bool) -> None:
    path = tmp_path / "file.pt"
    torch.save({"inputs": Marker(marker), "targets": 1}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match=r"holds other things than tensors and is not opened, since they may run code"):
        load_data(str(path))
    with pytest.raises(ModelError, match="may run code; save the weights alone"):
        load_model(f"{__name__}:network", path)
    np.savez(tmp_path / "file.npz", inputs=np.array([Marker(marker)], dtype=object), targets=np.zeros(1))
    with pytest.raises(DataError, match=r"file\.npz cannot be read"):
        load_data(str(tmp_path / "file.npz"))
    assert not marker.exists()


def test_checkpoints_of_a_run(tmp_path: Path, marker: Path) -> None:
    """Even one whose name has the right checksum."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Checkpoint(3, {"weight": Marker(marker)}))
    with pytest.warns(UserWarning, match="may run code, and is not opened; the run begins anew"):
        assert checkpoints.latest() is None
    assert not marker.exists()


def test_images_that_are_programs(place: Path, marker: Path) -> None:
    """PostScript, which Pillow would hand to Ghostscript."""
    (place / "train" / "n01443537").mkdir(parents=True)
    script = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({marker}) (w) file closefile\n"
    (place / "train" / "n01443537" / "a.JPEG").write_text(script)
    with pytest.raises(DataError, match=r"a\.JPEG is not a readable image"):
        data.load("imagenet", place).images.read(torch.arange(1))
    assert not marker.exists()


# ---------------------------------------------------------------------- members and links outside


def test_members_outside_are_never_written(place: Path, marker: Path) -> None:
    batch = _binary(*_cifar_batches(np.random.default_rng(0))[0])
    with tarfile.open(place / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name in ("../../marker", str(marker), "data/../../../marker"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"bad"))
        for kind, target in ((tarfile.SYMTYPE, "/etc/hostname"), (tarfile.LNKTYPE, "../../x"), (tarfile.FIFOTYPE, "")):
            info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
            info.type, info.linkname = kind, target
            tar.addfile(info)
        for number in range(1, 6):
            info = tarfile.TarInfo(f"../../../data_batch_{number}.bin")
            info.size = len(batch)
            tar.addfile(info, io.BytesIO(batch))
    before = sorted(place.parent.rglob("*"))
    assert len(data.load("cifar-10", place, verify=False)) == 20
    assert sorted(place.parent.rglob("*")) == before
    with tarfile.open(place / "tiny-imagenet.tar", "w") as tar:
        info = tarfile.TarInfo("train/n01443537/images/link.JPEG")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(info)
    with pytest.raises(DataError, match="has no train"):
        data.load("tiny-imagenet", place)


# ---------------------------------------------------------------------- a little that stands for much

_MANY = 48 << 20


def _zeros(opened: Any) -> None:
    for _ in range(_MANY >> 20):
        opened.write(bytes(1 << 20))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_files_are_bounded(place: Path, suffix: str) -> None:
    for name in ("train-images-idx3-ubyte", "data_batch_1.bin"):
        path = place / f"{name}{suffix}"
        with gzip.open(path, "wb", 1) if suffix == ".gz" else lzma.open(path, "wb", preset=0) as file:
            _zeros(file)
        assert path.stat().st_size < 2 << 20
    (place / "train-labels-idx1-ubyte").write_bytes(_idx(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match="holds more than 47040016 bytes, and the published file does not"):
        data.load("mnist2", place)
    for number in range(2, 6):
        (place / f"data_batch_{number}.bin").write_bytes(b"")
    with pytest.raises(DataError, match="holds more than 32650625 bytes"):
        data.load("cifar-10", place)


def test_an_archive_is_bounded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "cifar-10-binary.tar.gz"
    info = tarfile.TarInfo("data_batch_1.bin")
    info.size = _MANY
    with gzip.open(path, "wb", 1) as file:
        file.write(info.tobuf())
        _zeros(file)
    with pytest.raises(
        DataError, match=r"data_batch_1\.bin in cifar-10-binary\.tar\.gz holds more than 32650625 bytes"
    ):
        data.load("cifar-10", place)
    # a header that is itself larger than all of CIFAR-10
    info.name, info.type = "./@LongLink", tarfile.GNUTYPE_LONGNAME
    with gzip.open(path, "wb", 1) as file:
        file.write(info.tobuf())
        _zeros(file)
    monkeypatch.setattr("kronscope.paper.data.cifar.MOST_BYTES", 8 << 20)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz holds more than 8388608 bytes"):
        data.load("cifar-10", place)


@pytest.mark.parametrize("size", [(60_000, 60_000), (1, 65_000)])
def test_images_are_bounded(size: tuple[int, int]) -> None:
    from PIL import Image

    from kronscope.paper.data.imagenet import decode

    file = io.BytesIO()
    if size[0] == 1:
        Image.new("L", size).save(file, "PNG")
        content = file.getvalue()
    else:
        Image.new("L", (8, 8)).save(file, "PNG")
        content = _with_size(file.getvalue(), size)
    with pytest.raises(DataError, match=r"pixels|not a readable image"):
        decode(content, 224, name="bomb.png")


def _with_size(png: bytes, size: tuple[int, int]) -> bytes:
    """The picture, with another size in its header."""
    import zlib

    header = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big") + png[24:29]
    return png[:16] + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big") + png[33:]


def _npy(shape: str, descr: str = "'|u1'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ("(99999999, 32, 32, 3)", "at most"),
        ("(-5, 32, 32, 3)", "Could not read|needs|bytes"),
        ("(2, 64, 64, 3)", r"needs X \(N, 32, 32, 3\)"),
        ("(2, 32, 32, 4)", r"needs X \(N, 32, 32, 3\)"),
        ("(3, 32, 32, 3)", r"needs X \(N, 32, 32, 3\)"),
        ("()", "in a form"),
        ("(1e999,)", "Could not read"),
    ],
)
def test_parts_of_other_sizes_are_refused(place: Path, shape: str, match: str) -> None:
    with zipfile.ZipFile(place / "cifar5m_part0.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", _npy(shape) + bytes(3 * 64 * 64 * 4))
        archive.writestr("Y.npy", _npy("(2,)") + bytes(2))
    with pytest.raises(DataError, match=match):
        data.load("cifar-5m", place)


def test_labels_that_are_no_numbers_of_classes_are_refused(place: Path) -> None:
    pixels = np.zeros((2, 32, 32, 3), np.uint8)
    np.savez(place / "cifar5m_part0.npz", X=pixels, Y=np.array([0.5, 1.0]))
    with pytest.raises(DataError, match="whole numbers"):
        data.load("cifar-5m", place)
    np.savez(place / "imagenet1k_sample.npz", x=pixels, y=np.array([0, 1000]))
    with pytest.raises(DataError, match="labels from 0 to 1000"):
        data.load("imagenet-sample", place)


def test_an_encrypted_archive_is_refused(place: Path) -> None:
    path = place / "cifar5m_part0.npz"
    np.savez(path, X=np.zeros((2, 32, 32, 3), np.uint8), Y=np.zeros(2, np.int64))
    content = bytearray(path.read_bytes())
    for start in (b"PK\x03\x04", b"PK\x01\x02"):
        at = content.find(start)
        content[at + (6 if start[2] == 3 else 8)] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="encrypted"):
        data.load("cifar-5m", place)


def test_a_file_of_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "data.npz", inputs=np.zeros((1 << 20, 3)), targets=np.zeros(1 << 20))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4096}[name])
    with pytest.raises(DataError, match="give fewer samples"):
        load_data(str(tmp_path / "data.npz"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_not_called_damaged(place: Path) -> None:
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (place / name).write_bytes(b"")
        (place / name).chmod(0)
    with pytest.raises(DataError, match="Permission denied; check its permissions"):
        data.load("mnist2", place)


def test_random_damage_is_refused_in_words(place: Path) -> None:
    """Bytes changed, cut and put in anywhere, in every format."""
    rng = np.random.default_rng(0)
    batches = _cifar_batches(rng)
    whole: dict[str, tuple[str, bytes]] = {}
    for packed in ("gz", "xz"):
        pack = gzip.compress if packed == "gz" else lzma.compress
        whole[f"train-images-idx3-ubyte.{packed}"] = "mnist2", pack(_idx(np.zeros((4, 28, 28), np.uint8)))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for number, batch in enumerate(batches, 1):
            info = tarfile.TarInfo(f"data_batch_{number}.bin")
            info.size = len(_binary(*batch))
            tar.addfile(info, io.BytesIO(_binary(*batch)))
    whole["cifar-10-binary.tar.gz"] = "cifar-10", archive.getvalue()
    npz = io.BytesIO()
    np.savez_compressed(npz, X=np.zeros((2, 32, 32, 3), np.uint8), Y=np.zeros(2, np.int64))
    whole["cifar5m_part0.npz"] = "cifar-5m", npz.getvalue()
    tiny = io.BytesIO()
    with tarfile.open(fileobj=tiny, mode="w") as tar:
        info = tarfile.TarInfo("train/n01443537/images/a.JPEG")
        info.size = len(_jpeg((9, 9, 9), (64, 64)))
        tar.addfile(info, io.BytesIO(_jpeg((9, 9, 9), (64, 64))))
    whole["tiny-imagenet.tar"] = "tiny-imagenet", tiny.getvalue()
    (place / "train-labels-idx1-ubyte").write_bytes(_idx(np.zeros(4, np.uint8)))
    refused = 0
    for file, (name, content) in whole.items():
        for _ in range(30):
            changed = bytearray(content)
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(len(changed)))
                kind = rng.integers(3)
                if kind == 0:
                    changed[at] ^= int(rng.integers(1, 256))
                elif kind == 1:
                    del changed[at:]
                    changed = changed or bytearray(1)
                else:
                    changed[at:at] = rng.bytes(5)
            (place / file).write_bytes(changed)
            try:
                data.load(name, place, verify=False)
            except KronscopeError:
                refused += 1
        (place / file).unlink()
    assert refused > 100
