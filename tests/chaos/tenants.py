"""Plays tenants, determined by the seed and the server's answers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types

from tests.support.pictures import png

BASE_MODEL, TEACHER = "tiny", "teacher"
VOCABULARY = 512
ADAM = types.AdamParams(learning_rate=0.003, weight_decay=0.01, grad_clip_norm=1.0)
CHUNK = 1024  # most datums of one request; the SDK cuts longer calls

Note = Callable[[str, Any], None]
Tenant = Callable[[tinker.ServiceClient, Note, int, int], None]


def supervised(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Fine-tunes: gradients of two calls are summed, and some calls are cut into several requests."""
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=seed).result()
    random = np.random.default_rng([seed, 1])
    for number in range(rounds):
        first = _sequences(random, lengths=(20, 9, 31))
        second = _sequences(random, lengths=[3] * (CHUNK + 6) if number % 8 == 3 else (12, 40))
        gradients = [trainer.forward_backward(data, "cross_entropy") for data in (first, second)]
        step = trainer.optim_step(ADAM)
        for gradient in gradients:
            _note_training(note, gradient.result())
        note("step", step.result().metrics)
    _note_checkpoints(note, trainer, steps=rounds)


def reinforced(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Samples from each version of its weights, and reinforces what had many even tokens."""
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed + 1).result()
    random = np.random.default_rng([seed, 2])
    for number in range(rounds):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompt = random.integers(0, VOCABULARY, 6).tolist()
        params = types.SamplingParams(max_tokens=10, seed=seed * 1000 + number, stop=[])
        answers = _sample(note, sampler, types.ModelInput.from_ints(prompt), 4, params)
        targets = [[*prompt, *answer.tokens] for answer in answers]
        scored = trainer.forward([_supervised(tokens) for tokens in targets], "cross_entropy").result()
        _note_training(note, scored)
        rewards = [float(np.mean([token % 2 == 0 for token in answer.tokens])) for answer in answers]
        data = [
            _reinforced(prompt, answer, reward - float(np.mean(rewards)))
            for answer, reward in zip(answers, rewards, strict=True)
        ]
        gradient, step = trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(ADAM)
        _note_training(note, gradient.result())
        note("step", step.result().metrics)
    _note_checkpoints(note, trainer, steps=rounds)


def checkpointing(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Saves, goes back to what it has saved, publishes samplers, and goes on in a second model."""
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=seed + 2).result()
    random = np.random.default_rng([seed, 3])
    steps = 0  # that the optimizer state has seen
    saved: tuple[str, int] | None = None
    for number in range(rounds):
        gradient = trainer.forward_backward(_sequences(random, lengths=(16, 25)), "cross_entropy")
        step = trainer.optim_step(ADAM)
        _note_training(note, gradient.result())
        note("step", step.result().metrics)
        steps += 1
        match number % 6:
            case 1:
                saved = trainer.save_state(f"state-{number}").result().path, steps
            case 2:
                path = trainer.save_weights_for_sampler(f"sampler-{number}").result().path
                _note_sample(note, service.create_sampling_client(model_path=path).result(), seed + number)
            case 3 if saved is not None:
                trainer.load_state_with_optimizer(saved[0]).result()
                steps = saved[1]
            case 5 if number < 6 and saved is not None:
                branch = service.create_training_client_from_state_with_optimizer(saved[0]).result()
                branch.forward_backward(_sequences(random, lengths=(7, 8)), "cross_entropy").result()
                note("branch", branch.optim_step(ADAM).result().metrics)
                _note_checkpoints(note, branch, steps=saved[1] + 1)
    _note_checkpoints(note, trainer, steps)


def distilled(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Trains a student on what a teacher, which is another base model, writes and how it scores that."""
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=seed + 4).result()
    teacher = service.create_sampling_client(base_model=TEACHER).result()
    random = np.random.default_rng([seed, 4])
    for number in range(rounds):
        prompt = random.integers(0, VOCABULARY, 6).tolist()
        params = types.SamplingParams(max_tokens=12, seed=seed * 1000 + number, stop=[])
        answers = _sample(note, teacher, types.ModelInput.from_ints(prompt), 3, params)
        texts = [[*prompt, *answer.tokens] for answer in answers]
        scores = [teacher.compute_logprobs(types.ModelInput.from_ints(text)).result() for text in texts]
        note("scores", scores)
        weights = [[float(np.exp(score or 0.0)) for score in each[1:]] for each in scores]
        data = [_datum(text, weights=each) for text, each in zip(texts, weights, strict=True)]
        gradient, step = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
        _note_training(note, gradient.result())
        note("step", step.result().metrics)
    _note_training(note, trainer.forward(_sequences(random, lengths=(20, 31)), "cross_entropy").result())
    _note_checkpoints(note, trainer, steps=rounds)


def in_flight(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Trains, and samples the newest weights with samplers of kind inflight, old ones and new ones."""
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed + 5).result()
    random = np.random.default_rng([seed, 5])
    samplers = list[tinker.SamplingClient]()
    for number in range(rounds):
        gradient = trainer.forward_backward(_sequences(random, lengths=(18, 11)), "cross_entropy")
        step = trainer.optim_step(ADAM)
        _note_training(note, gradient.result())
        note("step", step.result().metrics)
        samplers.append(trainer.save_weights_and_get_sampling_client(kind="inflight").result())
        for sampler in {0: samplers[0], -1: samplers[-1]}.values():
            _note_sample(note, sampler, seed + number)
    _note_checkpoints(note, trainer, steps=rounds)


def seeing(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Samples behind pictures, most of them new, and reinforces what had many even tokens."""
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed + 6).result()
    random = np.random.default_rng([seed, 6])
    pictures = list[types.ImageChunk]()
    for number in range(rounds):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        before, after = (random.integers(0, VOCABULARY, length).tolist() for length in (4, 5))
        if number % 3 != 2:  # two new ones, and one that was there before
            pictures.append(_picture(64, 32 * int(random.integers(1, 5)), seed * 1000 + number))
        picture = pictures[-1] if number % 3 != 2 else pictures[random.integers(len(pictures))]
        prompt = [types.EncodedTextChunk(tokens=before), picture]
        whole = types.ModelInput(chunks=[*prompt, types.EncodedTextChunk(tokens=after)])
        params = types.SamplingParams(max_tokens=8, seed=seed * 1000 + number, stop=[])
        answers = _sample(note, sampler, whole, 3, params)
        rewards = [float(np.mean([token % 2 == 0 for token in answer.tokens])) for answer in answers]
        data = list[types.Datum]()
        for answer, reward in zip(answers, rewards, strict=True):
            ids = [*before, *[0] * picture.length, *after]
            datum = _reinforced(ids, answer, reward - float(np.mean(rewards)))
            text = types.EncodedTextChunk(tokens=[*after, *answer.tokens[:-1]])
            seen = types.ModelInput(chunks=[*prompt, text])
            data.append(types.Datum(model_input=seen, loss_fn_inputs=datum.loss_fn_inputs))
        gradient, step = trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(ADAM)
        _note_training(note, gradient.result())
        note("step", step.result().metrics)
    _note_checkpoints(note, trainer, steps=rounds)


def repeated(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Trains on what it samples behind one prompt, with one seed: an answer is likely to come again."""
    prompt = np.random.default_rng([seed, 7]).integers(0, VOCABULARY, 6).tolist()
    _train_on_answers(service, note, seed + 7, [prompt] * rounds)


def unrepeated(service: tinker.ServiceClient, note: Note, seed: int, rounds: int) -> None:
    """Does the same behind a new prompt each time."""
    prompts = np.random.default_rng([seed, 8]).integers(0, VOCABULARY, (rounds, 6)).tolist()
    _train_on_answers(service, note, seed + 8, prompts)


def _train_on_answers(
    service: tinker.ServiceClient, note: Note, seed: int, prompts: Sequence[list[int]]
) -> None:
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed).result()
    params = types.SamplingParams(max_tokens=40, seed=seed, stop=[])
    for prompt in prompts:
        sampler = trainer.save_weights_and_get_sampling_client().result()
        [answer] = _sample(note, sampler, types.ModelInput.from_ints(prompt), 1, params)
        gradient = trainer.forward_backward([_supervised([*prompt, *answer.tokens])], "cross_entropy")
        step = trainer.optim_step(ADAM)
        _note_training(note, gradient.result())
        note("step", step.result().metrics)
    _note_checkpoints(note, trainer, steps=len(prompts))


ALL = (supervised, reinforced, checkpointing)
WITH_TEACHER = (distilled, reinforced)
WITH_IMAGES = (seeing, supervised)
WITH_DRAFTS = (repeated, supervised)
WITHOUT_TEXTS = (unrepeated, supervised)  # that drafts could come from
WITH_SAMPLERS = (reinforced, checkpointing, in_flight)


def _picture(height: int, width: int, seed: int) -> types.ImageChunk:
    tokens = height * width // 32**2
    return types.ImageChunk(data=png(height, width, seed), format="png", expected_tokens=tokens)


def _note_training(note: Note, output: types.ForwardBackwardOutput) -> None:
    note("loss", output.metrics)
    note("logprobs", [record["logprobs"].tolist() for record in output.loss_fn_outputs])


def _note_sample(note: Note, sampler: tinker.SamplingClient, seed: int) -> None:
    params = types.SamplingParams(max_tokens=8, seed=seed, stop=[])
    _sample(note, sampler, types.ModelInput.from_ints([1, 2, 3]), 2, params)


def _sample(
    note: Note,
    sampler: tinker.SamplingClient,
    prompt: types.ModelInput,
    count: int,
    params: types.SamplingParams,
) -> Sequence[types.SampledSequence]:
    answers = sampler.sample(prompt, count, params).result().sequences
    note("samples", [list(answer.tokens) for answer in answers])
    note("sampled logprobs", [list(answer.logprobs or ()) for answer in answers])
    return answers


def _note_checkpoints(note: Note, trainer: tinker.TrainingClient, steps: int) -> None:
    """Note where the final state is, and how many updates it must have seen."""
    state = trainer.save_state("final").result().path
    weights = trainer.save_weights_for_sampler("final").result().path
    note("final", {"state": state, "weights": weights, "steps": steps})


def _sequences(random: np.random.Generator, lengths: Sequence[int]) -> list[types.Datum]:
    return [_supervised(random.integers(0, VOCABULARY, length).tolist()) for length in lengths]


def _supervised(tokens: Sequence[int]) -> types.Datum:
    return _datum(tokens, weights=[1.0] * (len(tokens) - 1))


def _reinforced(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    before = [0.0] * (len(prompt) - 1)
    advantages = [*before, *[float(advantage)] * len(answer.tokens)]
    logprobs = [*before, *(answer.logprobs or ())]
    return _datum([*prompt, *answer.tokens], logprobs=logprobs, advantages=advantages)


def _datum(tokens: Sequence[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **inputs},  # pyright: ignore[reportArgumentType]
    )
