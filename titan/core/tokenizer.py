"""Text to token ids and back: a Hugging Face tokenizers file, or a byte-level BPE trained once on the corpus."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from titan.core.config.validate import ConfigError
from titan.core.data.config import TokenizerConfig
from titan.core.files import write_atomically
from titan.core.progress import progress

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|end_of_text|>"

# What published tokenizers call it, for a tokenizer.json with no settings beside it that say so.
_KNOWN_END_OF_TEXT = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>")

# Training looks at the beginning of a larger corpus: its time and memory grow with the text, its merges hardly change.
_MAX_TRAINING_CHARACTERS = 256 * 2**20


class Tokenizer:
    """A tokenizer with an end-of-text token, which no text encodes to: in a document its name is plain characters.

    Attributes:
      path: the tokenizer.json file.
      vocab_size: the largest token id plus 1.
      eos_id: the end-of-text token.
      fingerprint: 32 hexadecimal digits; equal for equal files.
    """

    def __init__(self, path: pathlib.Path, eos_tokens: Sequence[str]):
        """Loads a tokenizers file; the first of `eos_tokens` that it knows ends a text. ValueError if there is none."""
        import tokenizers

        content = path.read_bytes()
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"not a tokenizers file ({error})") from error
        known = [token for token in eos_tokens if tokenizer.token_to_id(token) is not None]
        if not known:
            raise ValueError(f"its vocabulary has no end-of-text token {' or '.join(map(repr, eos_tokens))}")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # read special tokens in a text as the characters they are written with
        self._tokenizer = tokenizer
        self.path = path
        self.eos_id: int = tokenizer.token_to_id(known[0])
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint: str = hashlib.blake2b(content, digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32 [num_tokens], with no beginning or end added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32 [num_tokens]; texts are spread over the CPU's cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included; ids that end inside a character give U+FFFD there."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


def load_tokenizer(
    config: TokenizerConfig, documents: Callable[[], Iterable[str]], corpus_fingerprint: str
) -> Tokenizer:
    """The tokenizer at `config.path`, or else a BPE of `config.vocab_size` ids trained on `documents` and cached.

    The trained BPE has the 256 bytes as its alphabet, so decoding gives back any text exactly. It may have fewer ids
    than asked for where the corpus has too few repeated pairs.

    Args:
      config: the `tokenizer` section.
      documents: gives the corpus; called only when a BPE must be trained.
      corpus_fingerprint: changes with the corpus; the cached BPE is kept under it.

    Raises:
      ConfigError: the file is missing, is no tokenizer, or its end-of-text token is not known.
    """
    if config.path:
        return _load(config.path)
    path = _cached_path(config, corpus_fingerprint)
    try:
        return Tokenizer(path, (END_OF_TEXT,))
    except FileNotFoundError:
        pass
    except ValueError as error:
        logging.warning("%s is damaged (%s); training the tokenizer again.", path, error)
    logging.info("Training a tokenizer of %d ids, kept in %s.", config.vocab_size, path)
    with progress("training the tokenizer"):
        write_atomically(path, _train_bpe(config.vocab_size, documents()).to_str().encode())
    return Tokenizer(path, (END_OF_TEXT,))


def _cached_path(config: TokenizerConfig, corpus_fingerprint: str) -> pathlib.Path:
    import tokenizers

    key = repr((1, corpus_fingerprint, config.vocab_size, tokenizers.__version__, _MAX_TRAINING_CHARACTERS)).encode()
    name = f"bpe-{config.vocab_size}-{hashlib.blake2b(key, digest_size=16).hexdigest()}.json"
    return pathlib.Path(config.cache_folder).expanduser() / name


def _train_bpe(vocab_size: int, documents: Iterable[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(documents, _MAX_TRAINING_CHARACTERS), trainer)
    return tokenizer


def _first_characters(documents: Iterable[str], max_characters: int) -> Iterator[str]:
    num_characters = 0
    for document in documents:
        if num_characters >= max_characters:
            return
        num_characters += len(document)
        yield document


def _load(given: str) -> Tokenizer:
    path = pathlib.Path(given).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        cure = "give a tokenizer.json or the folder that holds it"
        raise ConfigError("tokenizer.path", f"there is no file {path}", cure)
    declared = _declared_end_of_text(path.parent)
    try:
        return Tokenizer(path, (declared,) if declared else _KNOWN_END_OF_TEXT)
    except (OSError, ValueError) as error:
        cure = 'give a tokenizers file, with its end of text as "eos_token" in a tokenizer_config.json beside it'
        raise ConfigError("tokenizer.path", f"{path}: {error}", cure) from error


def _declared_end_of_text(folder: pathlib.Path) -> str | None:
    """The `eos_token` of the settings that transformers writes beside a tokenizer.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_bytes()).get("eos_token")
        except (AttributeError, ValueError) as error:
            problem = f"{file}: not a JSON object ({error})"
            raise ConfigError("tokenizer.path", problem, "repair or remove it") from error
        if isinstance(token, dict):  # an added token with its stripping rules
            token = token.get("content")
        if isinstance(token, str) and token:
            return token
    return None
