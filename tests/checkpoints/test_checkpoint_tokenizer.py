"""Tokenizers: the same ids from every format, BOS once, special tokens, chat templates, vocabularies."""

import datetime
import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from specjax.checkpoints import CheckpointError, Tokenizer, check_same_vocabulary, load_tokenizer
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.gguf_tokenizer import gguf_tokenizer

from .conftest import TEMPLATE, tokenizer_metadata, write_gguf

TRICKY = [
  "",
  " ",
  "  leading and trailing  ",
  "the cat's mat, it's 1234567 and ½ or ٣",
  "line\nbreaks\r\n\n\n  and\ttabs",
  "héllo wörld — “quotes” ﬁ",
  "emoji 😀👩‍👩‍👧 and 漢字",
  "<|im_start|>user\nhi<|im_end|>\n",
  "a<|im_end|>b <|endoftext|> <|not_special|>",
  "x = {'a': [1, 2]}  # ok?!",
  "e\u0301 decomposed",
]


def write_folder(folder, inner, **config):
  folder.mkdir()
  inner.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return str(folder)


@pytest.fixture
def hf(tmp_path, bpe):
  return write_folder(
    tmp_path / "hf",
    bpe,
    bos_token="<|im_start|>",
    eos_token={"content": "<|im_end|>"},
    chat_template=TEMPLATE,
  )


@pytest.fixture
def both(tmp_path, bpe, hf):
  """The same vocabulary from a GGUF file and from a folder."""
  path = write_gguf(tmp_path / "t.gguf", "llama", tokenizer_metadata(bpe, padding=7), {})
  return load_tokenizer(path), load_tokenizer(hf)


def test_k6_both_formats_give_the_same_ids(both):
  ours, theirs = both
  assert ours.vocab_size == theirs.vocab_size == 290
  assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (theirs.bos_id, theirs.eos_ids, theirs.adds_bos)
  assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (1, (2,), False)
  for text in TRICKY:
    ids = ours.encode(text)
    assert ids == theirs.encode(text), text
    assert ours.decode(ids, skip_special=False) == text
    assert b"".join(map(ours.token_bytes, ids)) == text.encode()
  assert ours.decode(ours.encode(TRICKY[7])) == "user\nhi\n"
  assert ours.encode("<|im_end|>") == [2] and ours.is_special(2) and not ours.is_special(50)
  assert ours.id_to_token(290) is None and ours.token_bytes(305) == b""
  messages = [{"role": "user", "content": "it's 12 o'clock"}]
  assert ours.encode_chat(messages) == theirs.encode_chat(messages)
  assert ours.apply_chat_template(messages, False) == "<|im_start|>user\nit's 12 o'clock<|im_end|>\n"


def test_k6_bos_once_and_never_twice(tmp_path, bpe, hf):
  inner = tokenizers.Tokenizer.from_str(bpe.to_str())
  inner.post_processor = processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
  )
  tokenizer = load_tokenizer(write_folder(tmp_path / "bos", inner, bos_token="<|im_start|>"))
  assert tokenizer.adds_bos
  plain = load_tokenizer(hf).encode("the cat")
  assert tokenizer.encode("the cat") == [1, *plain]
  assert tokenizer.encode("<|im_start|>the cat") == [1, *plain]
  assert tokenizer.encode("<|im_start|>the cat", add_bos=True) == [1, *plain]
  assert tokenizer.encode("the cat", add_bos=False) == plain
  assert tokenizer.encode("") == [1]
  config = tmp_path / "bos" / "tokenizer_config.json"
  config.write_text(json.dumps({"bos_token": "<|im_start|>", "add_bos_token": False}))
  assert not load_tokenizer(str(tmp_path / "bos")).adds_bos
  config.write_text("{}")
  with pytest.raises(ValueError, match="no BOS token"):
    load_tokenizer(str(tmp_path / "bos")).encode("a", add_bos=True)


def test_eos_ids_come_from_generation_config_and_gguf_keys(tmp_path, bpe, hf):
  (tmp_path / "hf" / "config.json").write_text('{"eos_token_id": 0}')
  assert load_tokenizer(hf).eos_ids == (0, 2)
  (tmp_path / "hf" / "config.json").unlink()
  (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
  assert load_tokenizer(hf).eos_ids == (0, 2)
  metadata = {**tokenizer_metadata(bpe), "tokenizer.ggml.eot_token_id": 0}
  assert load_tokenizer(write_gguf(tmp_path / "e.gguf", "llama", metadata, {})).eos_ids == (0, 2)
  (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": 999}')
  with pytest.raises(CheckpointError, match="eos_ids = 999; ids go from 0 to 289"):
    load_tokenizer(hf)


# llama.cpp's own expressions for each way of cutting, applied one after the other.
LLAMA_CPP = {
  "smollm": [
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
  ],
  "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
  "llama-bpe": [
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  ],
  "qwen2": [
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  ],
}


@pytest.mark.parametrize("pre", LLAMA_CPP)
def test_gguf_text_is_cut_as_llama_cpp_cuts_it(bpe, pre):
  regex = pytest.importorskip("regex")
  file = GGUFFile("x", as_read(tokenizer_metadata(bpe, pre)), {})
  tokenizer = gguf_tokenizer(file)
  for text in [*TRICKY, "DON'T I'LL don't  \n\n 12345 a1b22", "\u00a0\u3000wide", "price:$5,000.00!!\n\nnew"]:
    pieces = [text]
    for pattern in LLAMA_CPP[pre]:
      pieces = [p for piece in pieces for p in cut(regex, pattern, piece)]
    expected = [t for p in pieces for t in tokenizer._inner.model.tokenize(byte_level(p))]
    if pre != "qwen2" or "\u0301" not in text:  # Hugging Face's qwen2 composes characters first
      if "<|" not in text:
        assert tokenizer.encode(text) == [t.id for t in expected], text


def as_read(metadata):
  import numpy as np

  types = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
  return {**metadata, "tokenizer.ggml.token_type": types}


def cut(regex, pattern, text):
  """Matches and what lies between them."""
  end = 0
  for match in regex.finditer(pattern, text):
    yield from filter(None, (text[end : match.start()], match.group()))
    end = match.end()
  yield from filter(None, (text[end:],))


def byte_level(text):
  from specjax.checkpoints.tokenizer import byte_alphabet

  letters = {byte[0]: letter for letter, byte in byte_alphabet().items()}
  return "".join(letters[b] for b in text.encode())


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama'.*byte-level"),
    ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre = 'tekken'.*smollm"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, "merges has 'zz qq'"),
    ({"tokenizer.ggml.tokens": ["a", "a"]}, "2 tokens, but 290 token types"),
    ({"tokenizer.ggml.bos_token_id": 1000}, "bos_id = 1000"),
  ],
)
def test_unsupported_gguf_vocabularies(tmp_path, bpe, changes, message):
  metadata = {**tokenizer_metadata(bpe), **changes}
  metadata = {k: v for k, v in metadata.items() if v is not None}
  with pytest.raises(CheckpointError, match=message):
    load_tokenizer(write_gguf(tmp_path / "t.gguf", "llama", metadata, {}))


def test_pieces_with_byte_fallback():
  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
  model = models.BPE(
    {p: i for i, p in enumerate(pieces)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>"
  )
  inner = tokenizers.Tokenizer(model)
  inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
  inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
  inner.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
  tokenizer = Tokenizer(inner, bos_id=1, eos_ids=[2], adds_bos=True)
  ids = tokenizer.encode("a aé😀")
  assert ids[0] == 1 and tokenizer.decode(ids) == "a aé😀"
  assert b"".join(map(tokenizer.token_bytes, ids[1:])) == "a aé😀".encode()
  assert tokenizer.token_bytes(1) == b"<s>"


def test_l1_same_vocabulary_despite_padding(both):
  ours, theirs = both
  check_same_vocabulary(ours, theirs)
  shorter = Tokenizer(theirs._inner, vocab_size=280)
  check_same_vocabulary(ours, shorter)
  check_same_vocabulary(shorter, ours)


def test_l1_different_strings_name_the_id(tmp_path, bpe, hf):
  description = json.loads(bpe.to_str())
  vocabulary = description["model"]["vocab"]
  first, second = (next(t for t, i in vocabulary.items() if i == n) for n in (40, 41))
  vocabulary[first], vocabulary[second] = 41, 40
  (tmp_path / "x").mkdir()
  (tmp_path / "x" / "tokenizer.json").write_text(json.dumps(description))
  with pytest.raises(ValueError, match=f"id 40 is '{first}' in the target and '{second}' in the draft"):
    check_same_vocabulary(load_tokenizer(hf), load_tokenizer(str(tmp_path / "x")))


@pytest.mark.parity
def test_chat_templates_equal_transformers(tmp_path, bpe):
  transformers = pytest.importorskip("transformers")
  template = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}\n  {{- m | tojson }} {% if loop.index0 == 5 %}{% break %}{% endif %}\n{% endfor %}\n"
    "{{ strftime_now('%Y') }}{% if add_generation_prompt %}A:{% endif %}"
  )
  folder = write_folder(
    tmp_path / "c", bpe, bos_token="<|im_start|>", tokenizer_class="PreTrainedTokenizerFast"
  )
  (tmp_path / "c" / "chat_template.jinja").write_text(template)
  tokenizer = load_tokenizer(folder)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  messages = [{"role": "user", "content": "<b>é</b> \"x\" 'y'"}, {"role": "assistant", "content": "ok"}]
  for flag in (True, False):
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=flag)
    assert tokenizer.apply_chat_template(messages, flag) == expected
  assert str(datetime.datetime.now().year) in tokenizer.apply_chat_template(messages)
  assert tokenizer.encode_chat(messages)[:1] == [1]
  with pytest.raises(CheckpointError, match="chat template: no bad"):
    tokenizer.apply_chat_template([{"role": "bad", "content": ""}])


@pytest.mark.parametrize(
  "template, message",
  [
    ("{% for %}", "chat template, line 1"),
    ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
    ("{{ messages.append(1) }}", "chat template: .*"),
    (None, "no chat template"),
  ],
)
def test_bad_chat_templates(bpe, template, message):
  with pytest.raises(CheckpointError, match=message):
    Tokenizer(bpe, chat_template=template).apply_chat_template([{"role": "user", "content": "x"}])


def test_damaged_tokenizer_files(tmp_path, hf):
  path = tmp_path / "hf" / "tokenizer.json"
  path.write_text(path.read_text()[:200])
  with pytest.raises(CheckpointError, match=r"tokenizer.json: not a tokenizer file, perhaps truncated"):
    load_tokenizer(hf)
  path.unlink()
  with pytest.raises(CheckpointError, match=r"no tokenizer.json"):
    load_tokenizer(hf)
