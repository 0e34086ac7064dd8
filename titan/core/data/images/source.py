"""Images and their captions, read one after another from files, in the same order every time."""

import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import itertools
import lzma
import pathlib
import re
import tarfile
import zlib
from collections.abc import Iterator

from titan.core.config.validate import ConfigError
from titan.core.data.corpus import corpus_fingerprint
from titan.core.data.file_stamp import FileStamp, files_below, stamp_of
from titan.core.data.images.config import ImageDataConfig

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
TAR_SUFFIXES = (".tar",)
PARQUET_SUFFIXES = (".parquet",)

# Package -> folder with images in it. They are found without importing the packages, which takes seconds.
_SAMPLES = {"skimage": "data", "sklearn": "datasets/images"}
_SAMPLE_SUFFIXES = (".jpg", ".png")
_DIGITS = ("sklearn", "datasets/data/digits.csv.gz")
_DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclasses.dataclass(frozen=True)
class Image:
    """One image as its file holds it.

    Attributes:
      name: where it is from, for messages.
      content: bytes of an image's file.
      caption: may be empty.
    """

    name: str
    content: bytes
    caption: str

    @property
    def hash(self) -> int:
        """64 bits of BLAKE2 of image and caption: equal on every machine and in every process."""
        digest = hashlib.blake2b(self.content, digest_size=8)
        digest.update(b"\0" + self.caption.encode())
        return int.from_bytes(digest.digest(), "little")

    @property
    def content_hash(self) -> int:
        """The same of the image alone."""
        return int.from_bytes(hashlib.blake2b(self.content, digest_size=8).digest(), "little")


class ImageSource:
    """The images of `--data.path`.

    - Empty path: the images that scikit-image and scikit-learn ship, and the name of a file is its caption; or the
      handwritten digits of scikit-learn (`--data.trial_images`).
    - A folder of images: every file below it with a suffix in IMAGE_SUFFIXES, sorted by path; hidden files and
      folders are left out.
    - A webdataset tar, or a folder of them: members whose names differ in the ending alone (from the first dot of the
      file's name) are a sample, of which the image and the caption are taken: 0.jpg and 0.txt, not 0.mask.png. Hidden
      members are left out.
    - A Parquet file, or a folder of them: a row is a sample.

    Attributes:
      files: the files, in reading order.
      description: the source in words, for messages.
    """

    def __init__(self, config: ImageDataConfig):
        """Lists the files; reads none of them.

        Raises:
          ConfigError: the path does not exist or holds no file of a known kind, or kinds are mixed; or a flag for
            another kind is given.
        """
        self._config = config
        if not config.path:
            self._kind = config.trial_images
            if self._kind == "digits":
                self.description, self.files = "the digits of scikit-learn", (_digits_file(),)
            else:
                self.description, self.files = "the images of scikit-image and scikit-learn", _sample_files()
            self._check_flags()
            return
        self.description = config.path
        root = pathlib.Path(config.path).expanduser().resolve()
        if not root.exists():
            raise ConfigError("data.path", f"there is no file or folder {config.path!r}", "correct the path")
        found = {
            kind: files_below(root, suffixes) if root.is_dir() else (root,) * root.name.lower().endswith(suffixes)
            for kind, suffixes in (("tar", TAR_SUFFIXES), ("parquet", PARQUET_SUFFIXES), ("folder", IMAGE_SUFFIXES))
        }
        kinds = [kind for kind, files in found.items() if files]
        if not kinds:
            suffixes = ", ".join((*TAR_SUFFIXES, *PARQUET_SUFFIXES, *IMAGE_SUFFIXES))
            raise ConfigError("data.path", f"{config.path!r} is or has no file that ends in {suffixes}", "give another")
        if len(kinds) > 1:
            problem = f"the folder {config.path!r} has {' and '.join(found[kind][0].name for kind in kinds[:2])}"
            raise ConfigError("data.path", problem, "give a folder of images, of tars or of Parquet files")
        self._kind = kinds[0]
        self.files = found[self._kind]
        self._check_flags()

    def _check_flags(self) -> None:
        """Refuses flags that would have no effect."""
        is_table = self._kind == "parquet"
        without_effect = ("caption_extension",) if is_table else ("image_column", "caption_column")
        for name in without_effect:
            value, default = getattr(self._config, name), getattr(ImageDataConfig, name)
            if value != default:
                problem = f"{value!r} means nothing for {self.description}, which is {'a' if is_table else 'no'} table"
                raise ConfigError(f"data.{name}", problem, f"leave it at {default!r}, or give another data.path")

    def images(self) -> Iterator[Image]:
        """Reads the images from the first one on, without decoding them.

        Raises:
          ConfigError: an unreadable file, a sample without caption, or a missing column; named with the sample.
        """
        found = itertools.chain.from_iterable(map(self._images_of, self.files))
        return itertools.islice(found, self._config.max_images or None)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change whenever any image, caption or their order does, wherever the files lie.

        All images are read for it, once: the result is remembered as that of a `Corpus`.

        Raises:
          ConfigError: as `images`, or there is no image.
        """

        def read() -> str:
            hashes = [image.hash for image in self.images()]
            if not hashes:
                raise ConfigError("data.path", f"{self.description} holds no image", "give files with images")
            return corpus_fingerprint(hashes)

        return self._stamp().remembered(self._config.cache_folder, read)

    def _stamp(self) -> FileStamp:
        config = self._config
        names = (config.caption_extension, config.image_column, config.caption_column, config.max_images)
        try:
            captions = [caption for file in self.files if (caption := self._caption_file(file)) and caption.exists()]
            return stamp_of((*self.files, *captions), reading=("pictures", 2, self._kind, *names))
        except OSError as error:
            raise ConfigError("data.path", str(error), "repair or remove the file") from error

    def _images_of(self, file: pathlib.Path) -> Iterator[Image]:
        try:
            if self._kind == "tar":
                yield from _of_tar(file, self._config.caption_extension)
            elif self._kind == "parquet":
                yield from _of_parquet(file, self._config.image_column, self._config.caption_column)
            elif self._kind == "digits":
                yield from _of_digits(file)
            else:
                yield Image(str(file), file.read_bytes(), self._caption_beside(file))
        except OSError as error:
            problem = f"{file} cannot be read ({error.strerror or error})"
            raise ConfigError("data.path", problem, "repair or remove the file") from error

    def _caption_file(self, file: pathlib.Path) -> pathlib.Path | None:
        """The file with the caption of an image's file; None where the name is the caption or it lies within."""
        extension = self._config.caption_extension
        return file.with_suffix(f".{extension}") if extension and self._kind == "folder" else None

    def _caption_beside(self, file: pathlib.Path) -> str:
        caption = self._caption_file(file)
        if caption is None:
            return _words(file.stem)
        if not caption.is_file():
            raise _no_caption(str(file), caption.name)
        return caption.read_bytes().decode("utf-8", "replace").strip()


def _sample_files() -> tuple[pathlib.Path, ...]:
    files = []
    for package, folder in _SAMPLES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None:
            root = pathlib.Path(spec.submodule_search_locations[0], folder)
            files += files_below(root, _SAMPLE_SUFFIXES) if root.is_dir() else ()
    if not files:
        raise ConfigError(
            "data.path",
            "it is empty, and neither scikit-image nor scikit-learn with their images are installed",
            "give a folder of images, or pip install scikit-image",
        )
    return tuple(files)


def _digits_file() -> pathlib.Path:
    package, file = _DIGITS
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ConfigError("data.trial_images", "scikit-learn is not installed", "pip install it, or give a data.path")
    return pathlib.Path(spec.submodule_search_locations[0], file)


def _of_digits(file: pathlib.Path) -> Iterator[Image]:
    """Rows of 64 grey values from 0 to 16 and the digit, as `sklearn.datasets.load_digits` documents them."""
    with gzip.open(file, "rt", encoding="ascii") as lines:
        for number, line in enumerate(lines):
            *greys, digit = (int(float(value)) for value in line.split(","))
            pixels = bytes(grey * 255 // 16 for grey in greys)
            # The simplest of image files (PGM): the same bytes, and so the same images held out, with any library.
            yield Image(f"{file}: row {number}", b"P5 8 8 255\n" + pixels, _DIGIT_NAMES[digit])


def _words(stem: str) -> str:
    return " ".join(re.split(r"[\W_]+", stem)).strip().lower()


def _no_caption(name: str, wanted: str) -> ConfigError:
    return ConfigError(
        "data.caption_extension",
        f"{name} has no caption: there is no {wanted} beside it",
        "add it, or give another extension, or an empty one to caption images by their names",
    )


def _of_tar(file: pathlib.Path, extension: str) -> Iterator[Image]:
    try:
        with tarfile.open(file) as archive:
            members = (member for member in archive if member.isfile() and not _is_hidden(member.name))
            for key, group in itertools.groupby(members, lambda member: _sample_key(member.name)):
                by_ending = {member.name.removeprefix(f"{key}."): member for member in group}
                endings = [ending for ending in by_ending if f".{ending.lower()}" in IMAGE_SUFFIXES]
                if not endings:
                    continue
                ending = endings[0]
                name = f"{file}:{key}.{ending}"
                if len(endings) > 1:
                    problem = f"{name} is in one sample with {key}.{endings[1]}"
                    raise ConfigError("data.path", problem, "leave one of them out, or give them different names")
                if not extension:
                    caption = _words(pathlib.PurePath(key).name)
                elif extension in by_ending:
                    caption = archive.extractfile(by_ending[extension]).read().decode("utf-8", "replace").strip()
                else:
                    raise _no_caption(name, f"{pathlib.PurePath(key).name}.{extension}")
                yield Image(name, archive.extractfile(by_ending[ending]).read(), caption)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError("data.path", f"{file} is no intact tar ({error})", "repair or remove the file") from error


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in pathlib.PurePosixPath(name).parts)


def _sample_key(name: str) -> str:
    """The member's path up to the first dot of its file's name, as webdataset groups members."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _of_parquet(file: pathlib.Path, image_column: str, caption_column: str) -> Iterator[Image]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            for flag, column in (("image_column", image_column), ("caption_column", caption_column)):
                if column not in columns:
                    cure = f"choose among its columns: {', '.join(columns) or 'none'}"
                    raise ConfigError(f"data.{flag}", f"{file}: no column {column!r}", cure)
            number = 0
            for batch in table.iter_batches(batch_size=16, columns=[image_column, caption_column]):
                for row in batch.to_pylist():
                    content, caption = row[image_column], row[caption_column]
                    if isinstance(content, dict):
                        content = content.get("bytes")
                    for flag, value, kind in (("image", content, bytes), ("caption", caption, str)):
                        if not isinstance(value, kind):
                            problem = f"{file}: row {number} has no {flag} ({type(value).__name__})"
                            raise ConfigError(f"data.{flag}_column", problem, "name another column, or remove the row")
                    yield Image(f"{file}: row {number}", content, caption)
                    number += 1
    except pyarrow.ArrowInvalid as error:
        raise ConfigError("data.path", f"{file} is no intact Parquet file ({error})", "repair or remove it") from error
