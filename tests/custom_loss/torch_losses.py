"""Losses as users write them, in torch, with the ranks of their inputs. Imported where torch is installed."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 (everybody's name for it)


def dpo(logprobs, chosen, rejected, reference):
    """A pair in one datum, told apart by masks (Rafailov et al. 2023)."""
    beta = 0.1
    chosen_ratio = ((logprobs - reference) * chosen).sum()
    rejected_ratio = ((logprobs - reference) * rejected).sum()
    margin = beta * (chosen_ratio - rejected_ratio)
    loss = -F.logsigmoid(margin)
    return loss, {"custom/margin:mean": margin, "custom/accuracy:mean": (margin > 0).float()}


def ipo(logprobs, chosen, rejected, reference):
    """Squared loss towards a margin, of mean log-ratios (Azar et al. 2023)."""
    ratio = logprobs - reference
    chosen_mean = (ratio * chosen).sum() / chosen.sum().clamp(min=1)
    rejected_mean = (ratio * rejected).sum() / rejected.sum().clamp(min=1)
    return (chosen_mean - rejected_mean - 1 / (2 * 0.1)) ** 2, {}


def simpo(logprobs, chosen, rejected):
    """Without a reference, length-normalized, with a target margin (Meng et al. 2024)."""
    margin = 2.0 * ((logprobs * chosen).sum() / chosen.sum() - (logprobs * rejected).sum() / rejected.sum())
    return F.softplus(-(margin - 0.5)), {"custom/margin:mean": margin.detach()}


def kl_penalised_policy_gradient(logprobs, sampling_logprobs, reference, advantages):
    """Importance-weighted policy gradient with the k3 estimate of the divergence from a reference."""
    ratio = torch.exp(logprobs - sampling_logprobs)
    log_ratio = reference - logprobs
    kl = torch.exp(log_ratio) - log_ratio - 1
    loss = -(ratio * advantages).sum() + 0.05 * kl.sum()
    return loss, {"custom/kl:sum": kl.sum(), "custom/ratio:mean": ratio.mean()}


def top_k_entropy(logprobs):
    """Entropy of the renormalised distribution over the K targets of each position."""
    renormalised = torch.log_softmax(logprobs, dim=-1)
    entropy = -(renormalised.exp() * renormalised).sum(dim=-1)
    return entropy.mean(), {"custom/entropy:mean": entropy.mean(), "custom/largest:mean": entropy.max()}


def top_k_reverse_kl(logprobs, teacher_logprobs, mask):
    """On-policy distillation over the student's top K."""
    student = logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)
    teacher = F.log_softmax(teacher_logprobs, dim=-1)
    kl = (student.exp() * (student - teacher)).sum(-1)
    loss = (kl * mask).sum() / mask.sum()
    return loss, {"custom/reverse_kl:mean": loss}


def forward_kl(logprobs, teacher_logprobs):
    """Distillation from a teacher's top K."""
    return F.kl_div(logprobs, teacher_logprobs, reduction="sum", log_target=True), {}


def ppo_by_hand(logprobs, sampling_logprobs, advantages):
    """Clipped surrogate (Schulman et al. 2017)."""
    ratio = (logprobs - sampling_logprobs).exp()
    clipped = torch.clamp(ratio, 0.8, 1.2)
    is_clipped = (ratio - clipped).abs() > 0
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {"custom/clip_fraction:mean": is_clipped.float().mean()}


def cispo_by_hand(logprobs, sampling_logprobs, advantages):
    """Clipped importance weights (MiniMax-M1, 2025)."""
    ratio = torch.exp(logprobs.detach() - sampling_logprobs).clamp(max=4.0)
    return -(ratio * logprobs * advantages).sum(), {"custom/ratio:mean": ratio.mean()}


def sequence_ratio(logprobs, sampling_logprobs, advantages, mask):
    """One ratio per sequence, the geometric mean over its tokens (GSPO, 2025)."""
    log_ratio = ((logprobs.detach() - sampling_logprobs) * mask).sum() / mask.sum()
    ratio = torch.exp(log_ratio + logprobs - logprobs.detach())
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages) * mask
    return loss.sum() / mask.sum(), {"custom/log_ratio:mean": log_ratio}


def length_normalised_nll(logprobs):
    """The mean over the datum's own tokens."""
    loss = -logprobs.sum() / logprobs.shape[0]
    return loss, {"custom/perplexity:mean": loss.exp(), "custom/root:sum": loss * math.sqrt(logprobs.size(0))}


def focal(logprobs, weights):
    """Less weight for what the model knows already (Lin et al. 2017)."""
    probability = logprobs.exp()
    loss = -(weights * (1 - probability) ** 2.0 * logprobs).sum()
    return loss, {"custom/probability:mean": probability.mean()}


def label_smoothed(logprobs, position_weights):
    """The first of K targets is the label, the rest shares the smoothing."""
    nll = -logprobs[:, 0]
    smooth = -logprobs[:, 1:].mean(dim=-1)
    loss = ((0.9 * nll + 0.1 * smooth) * position_weights).sum()
    return loss, {"custom/nll:sum": (nll * position_weights).sum()}


def hinge(logprobs, chosen, rejected, margin):
    """The chosen answer must be better by a margin that each datum gives."""
    difference = (logprobs * chosen).sum() - (logprobs * rejected).sum()
    return torch.relu(margin - difference), {"custom/violated:mean": (difference < margin).float()}


def huber_log_ratio(logprobs, reference):
    """Stay near a reference, without caring much for outliers."""
    loss = F.huber_loss(logprobs, reference, reduction="mean", delta=0.5)
    return loss, {"custom/worst:mean": torch.max((logprobs - reference).abs())}


def smooth_in_time(logprobs, advantages):
    """Rewards to go, and a penalty on jumps between neighbours."""
    to_go = advantages.flip(0).cumsum(0).flip(0)
    jumps = logprobs[1:] - logprobs[:-1]
    centred = (to_go - to_go.mean()) / (to_go.std() + 1e-6)
    loss = -(centred * logprobs).sum() + 0.1 * jumps.square().sum() + logprobs[-1] ** 2
    return loss, {"custom/jump:mean": jumps.abs().amax()}


LOSSES = {
    dpo: {"logprobs": 1, "chosen": 1, "rejected": 1, "reference": 1},
    ipo: {"logprobs": 1, "chosen": 1, "rejected": 1, "reference": 1},
    simpo: {"logprobs": 1, "chosen": 1, "rejected": 1},
    kl_penalised_policy_gradient: {"logprobs": 1, "sampling_logprobs": 1, "reference": 1, "advantages": 1},
    top_k_entropy: {"logprobs": 2},
    top_k_reverse_kl: {"logprobs": 2, "teacher_logprobs": 2, "mask": 1},
    forward_kl: {"logprobs": 2, "teacher_logprobs": 2},
    ppo_by_hand: {"logprobs": 1, "sampling_logprobs": 1, "advantages": 1},
    cispo_by_hand: {"logprobs": 1, "sampling_logprobs": 1, "advantages": 1},
    sequence_ratio: {"logprobs": 1, "sampling_logprobs": 1, "advantages": 1, "mask": 1},
    length_normalised_nll: {"logprobs": 1},
    focal: {"logprobs": 1, "weights": 1},
    label_smoothed: {"logprobs": 2, "position_weights": 1},
    hinge: {"logprobs": 1, "chosen": 1, "rejected": 1, "margin": 0},
    huber_log_ratio: {"logprobs": 1, "reference": 1},
    smooth_in_time: {"logprobs": 1, "advantages": 1},
}

K = 4  # targets per position of losses of rank 2


def random_input(name: str, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """A value of this name that makes sense."""
    shape = [(), (tokens,), (tokens, K)][rank]
    uniform = torch.rand(shape, generator=generator)
    match name:
        case "chosen":
            return (torch.arange(tokens) < tokens // 2).float()
        case "rejected":
            return (torch.arange(tokens) >= tokens // 2).float()
        case "mask" | "weights" | "position_weights":
            return torch.where(torch.arange(tokens) == 0, 1.0, (uniform > 0.3).float())
        case "advantages":
            return 2 * uniform - 1
        case "margin":
            return 1 + uniform
        case "ids":
            return (uniform * 3).long()
    return -0.05 - 3 * uniform  # log-probabilities
