"""A tokenised corpus on disk: every document's token ids, tokenised once, then mapped into memory at any place."""

import array
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
from absl import logging

from titan.core.config.validate import ConfigError
from titan.core.data.corpus import Corpus, corpus_fingerprint, document_hash
from titan.core.progress import progress
from titan.core.tokenizer import Tokenizer

# Enough documents at once to keep every core busy, few enough that their encodings stay small in memory.
_BATCH_CHARACTERS = 2 * 2**20


class TokenStore:
    """The token ids of a corpus, each document followed by the end-of-text token.

    Attributes:
      tokens: ids of all documents, one after another; uint16 or uint32 [num_tokens], mapped from disk.
      offsets: document i is `tokens[offsets[i]:offsets[i + 1]]`; int64 [num_documents + 1].
      hashes: 64-bit hash of each document's text; uint64 [num_documents].
    """

    def __init__(self, folder: pathlib.Path):
        """Opens what `open_token_store` wrote. Raises OSError, ValueError, TypeError or EOFError if it is damaged."""
        self.offsets = np.load(folder / "offsets.npy")
        self.hashes = np.load(folder / "hashes.npy")
        self.tokens = np.memmap(folder / "tokens.bin", dtype=(folder / "dtype").read_text(encoding="ascii"), mode="r")
        if len(self.offsets) != len(self.hashes) + 1 or self.offsets[-1] != len(self.tokens):
            raise ValueError("its files do not belong together")


def open_token_store(corpus: Corpus, tokenizer: Tokenizer, cache_folder: str) -> TokenStore:
    """The tokenised corpus, from `cache_folder` if it is there, else tokenised now and kept there.

    The cache's key is made of the fingerprints of corpus and tokenizer, so it cannot be stale. Processes that start at
    once may each tokenise the corpus; the first to finish provides the files, and none sees half of them.

    Raises:
      ConfigError: as `Corpus.documents`, or the files changed meanwhile.
    """
    key = hashlib.blake2b(repr((1, corpus.fingerprint, tokenizer.fingerprint)).encode(), digest_size=16).hexdigest()
    root = pathlib.Path(cache_folder).expanduser()
    folder = root / f"tokens-{key}"
    if folder.exists():
        try:
            return TokenStore(folder)
        except (OSError, ValueError, TypeError, EOFError) as error:
            logging.warning("%s is damaged (%s); tokenising the corpus again.", folder, error)
            shutil.rmtree(folder)
    logging.info("Tokenising %s, kept in %s.", corpus.description, folder)
    root.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(dir=root, prefix=".tokens-"))
    try:
        _write(corpus, tokenizer, temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return TokenStore(folder)


def _write(corpus: Corpus, tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    offsets = array.array("q", [0])
    hashes = array.array("Q")
    with (folder / "tokens.bin").open("wb") as file, progress("tokenising documents") as work:
        for batch in _batches(corpus.documents()):
            for document, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                file.write(np.append(ids, tokenizer.eos_id).astype(dtype).tobytes())
                offsets.append(offsets[-1] + len(ids) + 1)
                hashes.append(document_hash(document))
            work.advance(len(batch))
    if corpus_fingerprint(hashes) != corpus.fingerprint:
        raise ConfigError("data.path", f"{corpus.description} changed while it was read", "start again")
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64))
    (folder / "dtype").write_text(dtype, encoding="ascii")


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
