"""Loaders on files written here, in each format the data sets are published in."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kronscope.errors import DataError, MissingDataError, OptionError
from kronscope.paper import data
from kronscope.paper.data import cifar, files, mnist
from kronscope.paper.data.imagenet import decode

PIL_Image = pytest.importorskip("PIL.Image")
_WNIDS = ("n01443537", "n02124075", "n07583066")


def _idx(array: np.ndarray) -> bytes:
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def _pack(content: bytes, suffix: str) -> bytes:
    return {"": content, ".gz": gzip.compress(content), ".xz": lzma.compress(content)}[suffix]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _write_mnist(folder: Path, rng: np.random.Generator, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    images = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = (np.arange(20) % 5).astype(np.uint8)
    (folder / f"train-images-idx3-ubyte{suffix}").write_bytes(_pack(_idx(images), suffix))
    (folder / f"train-labels-idx1-ubyte{suffix}").write_bytes(_pack(_idx(labels), suffix))
    return images, labels


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
def test_mnist2_keeps_the_digits_0_and_1_as_vectors(tmp_path, rng, suffix, folder):
    images, labels = _write_mnist(tmp_path / folder, rng, suffix)
    dataset = data.load("mnist2", tmp_path, verify=False)
    inputs, targets = dataset.batch(torch.arange(len(dataset)))
    expected = (images[labels <= 1].reshape(-1, 784) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-6)
    assert targets.flatten().tolist() == labels[labels <= 1].tolist()
    assert targets.shape == (8, 1)
    assert targets.dtype == inputs.dtype == torch.float32
    assert "unverified" in dataset.title


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path, rng):
    _write_mnist(tmp_path, rng)
    with pytest.raises(
        DataError, match=r"not the published file of MNIST.*data\.load\(\.\.\., verify=False\)"
    ) as raised:
        data.load("mnist2", tmp_path)
    assert "--" not in str(raised.value), "no command has an option for this"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "starts with nothing"),
        (b"<html>", "not 000008"),
        (_idx(np.zeros((4, 28, 28), np.uint8))[:-1], "should have 3152 bytes"),
        (bytes([0, 0, 8, 3, 0, 0]), "ends inside its header"),
    ],
)
def test_damaged_idx_files_are_explained(content, match):
    with pytest.raises(DataError, match=match):
        mnist.parse_idx(content)


def test_a_compressed_file_cut_short_is_explained(tmp_path, rng):
    _write_mnist(tmp_path, rng, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cut short"):
        data.load("mnist2", tmp_path, verify=False)


def _cifar_batches(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(rng.integers(0, 256, (4, 3072), dtype=np.uint8), rng.integers(0, 10, 4, dtype=np.uint8)) for _ in range(5)]


def _binary(images: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None], images], axis=1).tobytes()


def _pickled(images: np.ndarray, labels: np.ndarray) -> bytes:
    batch = {b"batch_label": b"training batch", b"labels": labels.tolist(), b"data": images}
    return pickle.dumps(batch, protocol=2)


def _check_cifar(dataset: data.Dataset, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
    inputs, targets = dataset.batch(torch.arange(len(dataset)))
    images = np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32) / 255
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    np.testing.assert_allclose(inputs.numpy(), (images - mean[:, None, None]) / std[:, None, None], atol=1e-5)
    assert targets.tolist() == [int(label) for _, labels in batches for label in labels]
    assert targets.dtype == torch.int64


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_cifar10_binary(tmp_path, rng, suffix):
    batches = _cifar_batches(rng)
    (tmp_path / "cifar10").mkdir()
    for number, batch in enumerate(batches, start=1):
        path = tmp_path / "cifar10" / f"data_batch_{number}.bin{suffix}"
        path.write_bytes(_pack(_binary(*batch), suffix))
    _check_cifar(data.load("cifar-10", tmp_path, verify=False), batches)


def test_cifar10_python(tmp_path, rng):
    batches = _cifar_batches(rng)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, batch in enumerate(batches, start=1):
        (folder / f"data_batch_{number}").write_bytes(_pickled(*batch))
    _check_cifar(data.load("cifar-10", tmp_path, verify=False), batches)


def test_cifar10_python_as_python_2_wrote_it():
    # Built by hand from the opcodes of the published files: numpy.core.multiarray, str as bytes, a dict of lists.
    images = np.arange(3072, dtype=np.uint8).reshape(1, 3072)
    raw = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + images.tobytes() + b"tbU\x06labels](K\x07eu."
    )
    pixels, labels = cifar._parse_pickle(raw, "data_batch_1")
    assert labels.tolist() == [7]
    assert (pixels.reshape(1, 3072) == images).all()


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar10_archives_as_published(tmp_path, rng, kind):
    batches = _cifar_batches(rng)
    with tarfile.open(tmp_path / f"cifar-10-{kind}.tar.gz", "w:gz") as tar:
        for number, batch in enumerate(batches, start=1):
            name = f"data_batch_{number}" + (".bin" if kind == "binary" else "")
            content = _binary(*batch) if kind == "binary" else _pickled(*batch)
            info = tarfile.TarInfo(f"cifar-10-batches/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    _check_cifar(data.load("cifar-10", tmp_path, verify=False), batches)


class _Harmful:
    def __reduce__(self):
        return print, ("this must never run",)


def test_a_pickle_that_wants_to_run_code_is_refused(capsys):
    with pytest.raises(DataError, match=r"wants to run __builtin__\.print"):
        cifar._parse_pickle(pickle.dumps({b"data": _Harmful(), b"labels": []}, protocol=2), "data_batch_1")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content", [b"", b"not a pickle", pickle.dumps([1, 2]), pickle.dumps({b"data": 3, b"labels": [1]})]
)
def test_a_damaged_python_batch_is_explained(content):
    with pytest.raises(DataError, match="data_batch_1"):
        cifar._parse_pickle(content, "data_batch_1")


def test_a_binary_batch_of_the_wrong_length_is_explained(tmp_path, rng):
    for number, batch in enumerate(_cifar_batches(rng), start=1):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(_binary(*batch)[:-1])
    with pytest.raises(DataError, match="rows of 3073 bytes"):
        data.load("cifar-10", tmp_path, verify=False)


def test_an_incomplete_cifar10_names_what_is_missing(tmp_path, rng):
    for number, batch in enumerate(_cifar_batches(rng)[:3], start=1):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(_binary(*batch))
    with pytest.raises(MissingDataError, match=r"data_batch_4\.bin, data_batch_5\.bin beside"):
        data.load("cifar-10", tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_cifar5m_reads_its_parts_in_order_and_leaves_the_test_part_out(tmp_path, rng, save):
    parts = {}
    for number in (10, 2, 0, 5):
        parts[number] = rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 6)
        save(tmp_path / f"cifar5m_part{number}.npz", X=parts[number][0], Y=parts[number][1])
    dataset = data.load("cifar-5m", tmp_path, limit=14)
    expected = np.concatenate([parts[0][0], parts[2][0], parts[10][0][:2]]).transpose(0, 3, 1, 2)
    assert (dataset.images.read(torch.arange(14)).numpy() == expected).all()
    assert dataset.targets.tolist() == np.concatenate([parts[0][1], parts[2][1], parts[10][1][:2]]).tolist()
    assert dataset.title == "CIFAR-5M (part 0, 2, 10)"
    assert len(data.load("cifar-5m", tmp_path)) == 18
    assert data.load("cifar-5m", tmp_path, limit=3).title == "CIFAR-5M (part 0)"


def test_a_damaged_cifar5m_part_is_explained(tmp_path, rng):
    (tmp_path / "cifar5m_part0.npz").write_bytes(b"PK not really")
    with pytest.raises(DataError, match=r"cifar5m_part0\.npz"):
        data.load("cifar-5m", tmp_path)
    np.savez(tmp_path / "cifar5m_part0.npz", images=np.zeros(3))
    with pytest.raises(DataError, match="Could not read X"):
        data.load("cifar-5m", tmp_path)


def _jpeg(color: tuple[int, ...], size: tuple[int, int]) -> bytes:
    image = PIL_Image.new("RGB" if len(color) == 3 else "L", size, color if len(color) == 3 else color[0])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


_COLORS = {_WNIDS[0]: (200, 30, 30), _WNIDS[1]: (30, 200, 30), _WNIDS[2]: (90,)}


def _check_colors(dataset: data.Dataset, size: int) -> None:
    raw = dataset.images.read(torch.arange(len(dataset))).float()
    assert raw.shape[1:] == (3, size, size)
    for image, target in zip(raw, dataset.targets.tolist(), strict=True):
        color = _COLORS[_WNIDS[target]]
        expected = torch.tensor(color if len(color) == 3 else color * 3).float()
        assert (image.mean((1, 2)) - expected).abs().max() < 4
    assert sorted(set(dataset.targets.tolist())) == [0, 1, 2]


def test_imagenet_folder(tmp_path):
    for wnid, color in _COLORS.items():
        folder = tmp_path / "imagenet" / "train" / wnid
        folder.mkdir(parents=True)
        for number, shape in enumerate([(90, 60), (64, 64), (50, 200)]):
            (folder / f"{wnid}_{number}.JPEG").write_bytes(_jpeg(color, shape))
        (folder / "readme.txt").write_text("not an image")
    dataset = data.load("imagenet", tmp_path, image_size=64)
    assert len(dataset) == 9
    _check_colors(dataset, 64)
    with pytest.raises(MissingDataError):
        data.load("tiny-imagenet", tmp_path)


def test_tiny_imagenet_tar_and_folder_agree(tmp_path):
    with tarfile.open(tmp_path / "tiny-imagenet-200_subset.tar", "w") as tar:
        # Reversed: the result must not depend on the order inside the tar.
        for wnid in reversed(_WNIDS):
            for split, inner in (("val", ""), ("train", "images/")):
                name = f"tiny-imagenet-200/{split}/{wnid}/{inner}{wnid}_0.JPEG"
                content = _jpeg(_COLORS[wnid], (64, 64))
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                path = tmp_path / "unpacked" / name
                path.parent.mkdir(parents=True)
                path.write_bytes(content)
    from_tar = data.load("tiny-imagenet", tmp_path)
    from_folder = data.load("tiny-imagenet", tmp_path / "unpacked")
    assert len(from_tar) == 3
    _check_colors(from_tar, 64)
    assert from_tar.fingerprint() == from_folder.fingerprint()
    assert from_tar.title == "Tiny ImageNet (3 images, 3 classes)"
    with pytest.raises(MissingDataError):
        data.load("imagenet", tmp_path / "unpacked" / "tiny-imagenet-200")


def test_a_damaged_tar_or_image_is_explained(tmp_path):
    path = tmp_path / "tiny-imagenet-200.tar"
    path.write_bytes(b"no tar")
    with pytest.raises(DataError, match="Could not read"):
        data.load("tiny-imagenet", tmp_path)
    with tarfile.open(path, "w"):
        pass
    with pytest.raises(DataError, match="is it Tiny ImageNet"):
        data.load("tiny-imagenet", tmp_path)
    with pytest.raises(DataError, match="not a readable image"):
        decode(_jpeg((1, 2, 3), (64, 64))[:-400], 64)


def test_decoding_crops_the_centre():
    image = PIL_Image.new("RGB", (64, 32), (0, 0, 0))
    image.paste((255, 255, 255), (16, 0, 48, 32))
    file = io.BytesIO()
    image.save(file, "PNG")
    assert (decode(file.getvalue(), 32) == 255).all()


def test_imagenet_sample(tmp_path, rng):
    images, labels = rng.integers(0, 256, (5, 64, 64, 3), dtype=np.uint8), np.array([3, 999, 0, 5, 5])
    np.savez(tmp_path / "imagenet1k_sample_64.npz", x=images, y=labels, wnid=np.array(["n01443537"] * 5))
    dataset = data.load("imagenet-sample", tmp_path)
    assert (dataset.images.read(torch.arange(5)).numpy() == images.transpose(0, 3, 1, 2)).all()
    assert dataset.targets.tolist() == labels.tolist()
    assert dataset.classes == 1000
    np.savez(tmp_path / "imagenet1k_sample_64.npz", x=images[0], y=labels)
    with pytest.raises(DataError, match="needs x"):
        data.load("imagenet-sample", tmp_path)


@pytest.mark.parametrize(
    ("name", "downloadable"),
    [
        ("mnist2", True),
        ("cifar-10", True),
        ("cifar-5m", False),
        ("imagenet", False),
        ("tiny-imagenet", False),
        ("imagenet-sample", False),
    ],
)
def test_missing_data_says_what_where_and_how(tmp_path, name, downloadable):
    with pytest.raises(MissingDataError) as caught:
        data.load(name, tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "--data-dir" in text
    assert "never puts synthetic data" in text
    assert ("--download" in text) == downloadable
    with pytest.raises(FileNotFoundError, match="no data folder was given"):
        data.load(name)


def test_an_unknown_data_set_lists_the_known_ones():
    with pytest.raises(OptionError, match="cifar-10"):
        data.load("cifar")


def test_the_first_data_set_found_is_taken_and_a_damaged_one_is_not_passed_over(tmp_path, rng):
    for number, batch in enumerate(_cifar_batches(rng), start=1):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(_binary(*batch))
    assert data.load_first(("cifar-5m", "cifar-10"), tmp_path, verify=False).name == "cifar-10"
    (tmp_path / "cifar5m_part0.npz").write_bytes(b"damaged")
    with pytest.raises(DataError, match="cifar5m_part0"):
        data.load_first(("cifar-5m", "cifar-10"), tmp_path, verify=False)
    with pytest.raises(MissingDataError, match=r"(?s)ImageNet was not found.*Tiny ImageNet was not found"):
        data.load_first(("imagenet", "tiny-imagenet"), tmp_path)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_a_download_appears_only_whole_and_right(tmp_path):
    source = tmp_path / "server" / "file.gz"
    source.parent.mkdir()
    source.write_bytes(b"published" * 1000)
    target = tmp_path / "new" / "file.gz"
    absent = (tmp_path / "nowhere" / "file.gz").as_uri()
    files.download([absent, source.as_uri()], target, _digest(source.read_bytes()), data_set="X")
    assert target.read_bytes() == source.read_bytes()
    target.unlink()
    with pytest.raises(MissingDataError, match=r"Could not download X.*nowhere.*sent other bytes"):
        files.download([absent, source.as_uri()], target, _digest(b"other"), data_set="X")
    assert list(target.parent.iterdir()) == []


def test_a_download_needs_a_folder():
    with pytest.raises(OptionError, match="--data-dir"):
        data.load("mnist2", download=True)


def test_mnist_is_downloaded_where_the_loader_looks(tmp_path, rng, monkeypatch):
    server = tmp_path / "server"
    _write_mnist(server, rng, ".gz")
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
    digests = {name: _digest((server / f"{name}.gz").read_bytes()) for name in names}
    monkeypatch.setattr(mnist, "_DOWNLOAD", digests)
    mirrors = (f"{server.as_uri()}/",)
    fetched = mnist.load_mnist2(tmp_path / "data", fetch=True, verify=False, mirrors=mirrors)
    again = data.load("mnist2", tmp_path / "data", verify=False)
    assert fetched.fingerprint() == again.fingerprint()


def test_cifar10_is_downloaded_where_the_loader_looks(tmp_path, rng, monkeypatch):
    batches = _cifar_batches(rng)
    server = tmp_path / "server"
    server.mkdir()
    with tarfile.open(server / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for number, batch in enumerate(batches, start=1):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/data_batch_{number}.bin")
            info.size = len(_binary(*batch))
            tar.addfile(info, io.BytesIO(_binary(*batch)))
    monkeypatch.setattr(cifar, "_ARCHIVE_DIGEST", _digest((server / "cifar-10-binary.tar.gz").read_bytes()))
    mirrors = (f"{server.as_uri()}/",)
    _check_cifar(cifar.load_cifar10(tmp_path / "data", fetch=True, verify=False, mirrors=mirrors), batches)
    _check_cifar(data.load("cifar-10", tmp_path / "data", verify=False), batches)


def test_test_images_of_mnist_are_held_out(tmp_path, rng):
    _write_mnist(tmp_path, rng)
    assert data.load("mnist2", tmp_path, verify=False).held_out is None
    for kind, array in (
        ("images-idx3", rng.integers(0, 256, (6, 28, 28), dtype=np.uint8)),
        ("labels-idx1", np.array([0, 1, 2, 1, 7, 0], np.uint8)),
    ):
        (tmp_path / f"t10k-{kind}-ubyte").write_bytes(_idx(array))
    dataset = data.load("mnist2", tmp_path, verify=False)
    assert len(dataset) == 8
    assert dataset.held_out is not None
    assert dataset.held_out.targets.flatten().tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match="not the published file"):
        data.load("mnist2", tmp_path)


@pytest.mark.parametrize("kind", ["binary", "python", "archive"])
def test_test_images_of_cifar10_are_held_out(tmp_path, rng, kind):
    *batches, test = [*_cifar_batches(rng), *_cifar_batches(rng)[:1]]
    write = _pickled if kind == "python" else _binary
    suffix = "" if kind == "python" else ".bin"
    named = {f"data_batch_{number}{suffix}": write(*batch) for number, batch in enumerate(batches, start=1)}
    named[f"test_batch{suffix}"] = write(*test)
    if kind == "archive":
        with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
            for name, content in named.items():
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    else:
        for name, content in named.items():
            (tmp_path / name).write_bytes(content)
    dataset = data.load("cifar-10", tmp_path, verify=False)
    _check_cifar(dataset, batches)
    assert dataset.held_out is not None
    _check_cifar(dataset.held_out, [test])


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "images", "classes"), [("mnist2", 12665, 1), ("cifar-10", 50000, 10), ("tiny-imagenet", None, None)]
)
def test_real_data(data_dir, name, images, classes):
    try:
        dataset = data.load(name, data_dir)
    except MissingDataError as error:
        pytest.skip(str(error))
    inputs, _ = dataset.batch(torch.arange(2000))
    assert abs(float(inputs.mean())) < 0.2
    assert 0.8 < float(inputs.std()) < 1.2
    assert images is None or (len(dataset), dataset.classes) == (images, classes)
