"""The documents that a run trains on: read one after another from files, in the same order every time."""

import functools
import hashlib
import itertools
import json
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator

from titan.core.config.validate import ConfigError
from titan.core.data.config import DataConfig
from titan.core.data.file_stamp import FileStamp, files_below, stamp_of

TEXT_SUFFIXES = (".md", ".py", ".rst", ".text", ".txt")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)

# Tests are left out because distributions split them off into packages of their own: without them every install of one
# Python version has nearly the same corpus.
_STDLIB_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})

# A text file given by itself is cut into documents at the first blank line after this many characters, and at a line's
# end after four times as many where there is no blank line.
_DOCUMENT_CHARACTERS = 16_384


class Corpus:
    """The documents of `--data.path`: strings that are valid Unicode and never empty.

    - Empty path: each `.py` file of the Python standard library is a document; tests and installed packages are left
      out.
    - A folder: every file below it with a suffix in TEXT_SUFFIXES, JSONL_SUFFIXES or PARQUET_SUFFIXES, sorted by path;
      hidden files and folders are left out. A text file in a folder is one document.
    - A text file: documents of about 16 Ki characters, cut where there is a blank line; joined they are the file again.
    - A JSONL or Parquet file: each line or row is a document, its text being in `--data.text_field`.

    Bytes that are not UTF-8 are read as U+FFFD. Empty documents are left out.

    Attributes:
      files: the files, in reading order.
      description: the corpus in words, for messages.
    """

    def __init__(self, config: DataConfig):
        """Lists the files; reads none of them.

        Raises:
          ConfigError: the path does not exist or holds no file of a known kind.
        """
        self._config = config
        self._is_single_file = False
        if not config.path:
            self.description = "the Python standard library"
            self.files = _stdlib_files()
            return
        self.description = config.path
        root = pathlib.Path(config.path).expanduser().resolve()
        if root.is_dir():
            self.files = files_below(root, TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES)
        elif root.is_file():
            self._is_single_file = True
            self.files = (root,)
        else:
            raise ConfigError("data.path", f"there is no file or folder {config.path!r}", "correct the path")
        if not self.files:
            suffixes = ", ".join(TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES)
            problem = f"the folder {config.path!r} has no file that ends in {suffixes}"
            raise ConfigError("data.path", problem, "give another")

    def documents(self) -> Iterator[str]:
        """Reads the documents from the first one on.

        Raises:
          ConfigError: an unreadable or malformed file, or a missing field; named with the line, where there is one.
        """
        found = filter(None, itertools.chain.from_iterable(map(self._documents_of, self.files)))
        return itertools.islice(found, self._config.max_documents or None)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change whenever any document or their order does, wherever the files lie.

        All documents are read for it, once: the result is remembered under the state of the files (`FileStamp`).

        Raises:
          ConfigError: as `documents`, or there is no document.
        """

        def read() -> str:
            hashes = [document_hash(document) for document in self.documents()]
            if not hashes:
                raise ConfigError("data.path", f"{self.description} holds no text", "give files with text in them")
            return corpus_fingerprint(hashes)

        return self._stamp().remembered(self._config.cache_folder, read)

    def _stamp(self) -> FileStamp:
        config = self._config
        try:
            return stamp_of(self.files, reading=(1, self._is_single_file, config.text_field, config.max_documents))
        except OSError as error:
            raise _unreadable(pathlib.Path(error.filename), error) from error

    def _documents_of(self, file: pathlib.Path) -> Iterator[str]:
        try:
            if file.suffix.lower() in JSONL_SUFFIXES:
                yield from _jsonl_documents(file, self._config.text_field)
            elif file.suffix.lower() in PARQUET_SUFFIXES:
                yield from _parquet_documents(file, self._config.text_field)
            elif self._is_single_file:
                yield from _split_text(file)
            else:
                yield file.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise _unreadable(file, error) from error


def document_hash(document: str) -> int:
    """64 bits of BLAKE2 of the text: equal on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(document.encode("utf-8"), digest_size=8).digest(), "little")


def corpus_fingerprint(document_hashes: Iterable[int]) -> str:
    """`Corpus.fingerprint` of documents with these hashes, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for value in document_hashes:
        digest.update(value.to_bytes(8, "little"))
    return digest.hexdigest()


def _unreadable(file: pathlib.Path, error: OSError) -> ConfigError:
    return ConfigError("data.path", f"{file} cannot be read ({error.strerror or error})", "repair or remove the file")


def _stdlib_files() -> tuple[pathlib.Path, ...]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = files_below(root, (".py",), skipped_folders=_STDLIB_SKIPPED_FOLDERS)
    if not files:
        problem = f"this Python has no standard library source under {root}"
        raise ConfigError("data.path", problem, "give a file or folder")
    return files


def _split_text(file: pathlib.Path) -> Iterator[str]:
    lines: list[str] = []
    num_characters = 0
    # newline="" keeps each line's own ending.
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        for line in text:
            lines.append(line)
            num_characters += len(line)
            is_blank = not line.strip()
            if num_characters >= (_DOCUMENT_CHARACTERS if is_blank else 4 * _DOCUMENT_CHARACTERS):
                yield "".join(lines)
                lines, num_characters = [], 0
    yield "".join(lines)


def _jsonl_documents(file: pathlib.Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                record = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError) as error:
                raise ConfigError("data.path", f"{where}: not JSON ({error})", "correct or remove the line") from error
            if not isinstance(record, dict):
                raise ConfigError("data.path", f"{where}: not a JSON object", "give one object a line")
            if field not in record:
                cure = f"choose among its fields: {', '.join(sorted(record)) or 'none'}"
                raise ConfigError("data.text_field", f"{where}: no field {field!r}", cure)
            if not isinstance(record[field], str):
                problem = f"{where}: field {field!r} is not a string"
                raise ConfigError("data.text_field", problem, "name a field of text")
            # JSON can escape half a surrogate pair, which is no Unicode text.
            yield record[field].encode("utf-8", "replace").decode("utf-8")


def _parquet_documents(file: pathlib.Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                cure = f"choose among its columns: {', '.join(schema.names) or 'none'}"
                raise ConfigError("data.text_field", f"{file}: no column {column!r}", cure)
            kind = schema.field(column).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                problem = f"{file}: column {column!r} holds {kind}"
                raise ConfigError("data.text_field", problem, "name a column of strings")
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError("data.path", f"{file}: not a sound Parquet file ({problem})", "write it again") from error
