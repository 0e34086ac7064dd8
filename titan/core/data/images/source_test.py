"""The sources of images: which samples each kind of file gives, their fingerprint, and messages about bad input."""

import dataclasses
import io
import re
import shutil
import tarfile

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import webdataset

from titan.core.config.validate import ConfigError
from titan.core.data import file_stamp
from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.fit import decode
from titan.core.data.images.images_for_test import png
from titan.core.data.images.source import Image, ImageSource


def _pairs(config):
    return [(image.content, image.caption) for image in ImageSource(config).images()]


def _message(config, call=lambda source: list(source.images())):
    with pytest.raises(ConfigError) as error:
        call(ImageSource(config))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_a_webdataset_tar_and_a_parquet_file_give_the_same_samples(data, tmp_path):
    expected = _pairs(data)
    assert [caption for _, caption in expected] == [f"caption {number}" for number in range(6)]
    tar = tmp_path / "samples.tar"
    with webdataset.TarWriter(str(tar)) as writer:
        for number, (content, caption) in enumerate(expected):
            writer.write({"__key__": f"shard/{number:04d}", "png": content, "txt": caption, "json": {"id": number}})
    table = {"image": [{"bytes": content, "path": None} for content, _ in expected], "text": [c for _, c in expected]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "samples.parquet")
    for name in ("samples.tar", "samples.parquet"):
        assert _pairs(dataclasses.replace(data, path=str(tmp_path / name))) == expected
        folder = tmp_path / f"folder of {name}"
        folder.mkdir()
        shutil.copy(tmp_path / name, folder)
        assert _pairs(dataclasses.replace(data, path=str(folder), max_images=2)) == expected[:2]


def test_capitals_in_endings_are_the_same(data, tmp_path):
    expected = _pairs(data)
    for path in (tmp_path / "files").glob("p[0-3].png"):
        path.rename(path.with_suffix(".PNG"))
    assert _pairs(data) == expected


def _tar(path, members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return ImageDataConfig(path=str(path), cache_folder=str(path.parent / "cache"))


def test_of_a_sample_in_a_tar_the_image_alone_is_taken(tmp_path):
    members = {
        "./0.mask.png": png(8, 8, 1),
        "./0.JPG": b"the image",
        "./0.txt": b"a",
        "./._0.jpg": b"of a file manager",
        "./.hidden/1.png": b"hidden",
    }
    assert _pairs(_tar(tmp_path / "x.tar", members)) == [(b"the image", "a")]
    two = _tar(tmp_path / "y.tar", {"0.jpg": b"a", "0.png": b"b", "0.txt": b"c"})
    assert _message(two) == (
        f"--data.path: {tmp_path}/y.tar:0.jpg is in one sample with 0.png; leave one of them out, or give them "
        "different names"
    )


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_a_tar_that_was_cut_off_is_one_line(tmp_path, compression):
    content = np.random.default_rng(0).bytes(40_000)
    config = _tar(tmp_path / "x.tar", {"0.jpg": content, "0.txt": b"a"}, f"w:{compression}")
    assert _pairs(config) == [(content, "a")]
    file = tmp_path / "x.tar"
    file.write_bytes(file.read_bytes()[:20_000])
    assert re.match(f"--data.path: {file} (is no intact tar|cannot be read) \\(", _message(config))


def test_names_are_captions_where_none_are_asked_for(data, tmp_path):
    (tmp_path / "files/p0.png").rename(tmp_path / "files/a_Red-house.png")
    assert _pairs(dataclasses.replace(data, caption_extension=""))[0][1] == "a red house"


def test_the_images_that_come_with_packages_are_found_and_intact(tmp_path):
    images = list(ImageSource(ImageDataConfig(cache_folder=str(tmp_path))).images())
    assert {"astronaut", "china", "coffee", "flower"} <= {image.caption for image in images}
    assert all(decode(image).mode == "RGB" for image in images)


def test_fingerprint_follows_images_and_captions_and_not_their_place(data, tmp_path, monkeypatch):
    monkeypatch.setattr(file_stamp, "_CLOCK_TICK_NANOSECONDS", 0)
    first = ImageSource(data).fingerprint
    shutil.copytree(tmp_path / "files", tmp_path / "elsewhere")
    assert ImageSource(dataclasses.replace(data, path=str(tmp_path / "elsewhere"))).fingerprint == first
    assert ImageSource(dataclasses.replace(data, max_images=5)).fingerprint != first
    monkeypatch.setattr(ImageSource, "images", lambda self: pytest.fail("read again"))
    assert ImageSource(data).fingerprint == first
    monkeypatch.undo()
    (tmp_path / "files/p3.txt").write_text("another caption")
    assert ImageSource(data).fingerprint != first


def test_bad_input_is_one_line(data, tmp_path):
    files = tmp_path / "files"
    (files / "p2.txt").unlink()
    assert _message(data) == (
        f"--data.caption_extension: {files}/p2.png has no caption: there is no p2.txt beside it; add it, or give "
        "another extension, or an empty one to caption images by their names"
    )
    broken = dataclasses.replace(data, caption_extension="")
    (files / "p2.png").write_bytes(png(8, 8, 0)[:40])
    message = _message(broken, lambda source: [decode(image) for image in source.images()])
    assert message == (f"--data.path: {files}/p2.png is no intact image (its format is not known); repair or remove it")

    tar = tmp_path / "x.tar"
    with webdataset.TarWriter(str(tar)) as writer:
        writer.write({"__key__": "0", "jpg": np.zeros((8, 8, 3), np.uint8)})
    in_tar = dataclasses.replace(data, path=str(tar))
    assert f"{tar}:0.jpg has no caption: there is no 0.txt beside it" in _message(in_tar)
    tar.write_bytes(tar.read_bytes()[:700])
    assert f"--data.path: {tar} is no intact tar" in _message(in_tar)

    table = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"", None], "caption": ["a", "b"]}), table)
    in_table = dataclasses.replace(data, path=str(table))
    assert _message(in_table) == (
        f"--data.caption_column: {table}: no column 'text'; choose among its columns: image, caption"
    )
    named = dataclasses.replace(in_table, caption_column="caption")
    assert f"--data.image_column: {table}: row 1 has no image (NoneType)" in _message(named)
    table.write_bytes(b"PAR1")
    assert f"--data.path: {table} is no intact Parquet file" in _message(named)

    (tmp_path / "empty").mkdir()
    assert "is or has no file that ends in .tar, .parquet" in _message(
        dataclasses.replace(data, path=str(tmp_path / "empty"))
    )
    shutil.copy(tar, files)
    assert "has x.tar and p0.png" in _message(data)


def test_flags_of_another_kind_of_files_are_refused(data, tmp_path):
    for name in ("image_column", "caption_column"):
        assert _message(dataclasses.replace(data, **{name: "x"})) == (
            f"--data.{name}: 'x' means nothing for {tmp_path}/files, which is no table; leave it at "
            f"{getattr(ImageDataConfig, name)!r}, or give another data.path"
        )
    (tmp_path / "x.parquet").touch()
    table = dataclasses.replace(data, path=str(tmp_path / "x.parquet"), caption_extension="")
    assert _message(table).startswith(
        f"--data.caption_extension: '' means nothing for {tmp_path}/x.parquet, which is a"
    )


def test_a_image_of_16_bits_or_with_transparency_becomes_rgb():
    grey, clear = io.BytesIO(), io.BytesIO()
    PIL.Image.fromarray(np.full((2, 2), 40000, np.uint16)).save(grey, "PNG")
    PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(clear, "PNG")
    assert np.asarray(decode(Image("grey", grey.getvalue(), ""))).tolist() == np.full((2, 2, 3), 40000 >> 8).tolist()
    assert np.asarray(decode(Image("clear", clear.getvalue(), ""))).min() == 255


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 0.5), (np.int32, 2**30), (np.int32, -1)])
def test_a_image_whose_range_is_not_known_is_refused(dtype, value):
    content = io.BytesIO()
    PIL.Image.fromarray(np.full((2, 2), value, dtype)).save(content, "TIFF")
    with pytest.raises(ConfigError, match=r"x is no intact image \(its pixels .* is not known\)"):
        decode(Image("x", content.getvalue(), ""))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_image_is_turned_as_its_orientation_says(orientation):
    # EXIF 2.3, 4.6.4: where the stored row 0 and column 0 are seen.
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    content = io.BytesIO()
    PIL.Image.fromarray(np.ascontiguousarray(stored)).save(content, "PNG", exif=exif)
    assert np.array_equal(np.asarray(decode(Image("x", content.getvalue(), "")))[..., 0], upright)
