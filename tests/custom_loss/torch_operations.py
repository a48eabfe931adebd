"""One small loss per operation, and per way to call it, to compare with torch. Imported where torch is installed."""

import math

import torch
import torch.nn.functional as F

# Of l (logprobs) and a, [T]; p, in (0, 1), [T]; i, integers 0 to 2, [T]; k [T, 4]; s, a number. Each gives a tensor.
UNARY = {
    name: lambda l, a, p, i, k, s, name=name: getattr(p * l.exp(), name)()
    for name in (
        "abs acos asin asinh atan ceil cos cosh erf exp exp2 expm1 floor log log10 log1p log2 logit neg reciprocal relu round "
        "rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
    ).split()
}

OPERATIONS = UNARY | {
    "add_alpha": lambda l, a, p, i, k, s: torch.add(l, a, alpha=2),
    "sub_method": lambda l, a, p, i, k, s: l.sub(a).mul(2).div(s),
    "rsub": lambda l, a, p, i, k, s: 1 - l / a,
    "integer_division": lambda l, a, p, i, k, s: l * (i / (i + 1)),
    "floor_divide": lambda l, a, p, i, k, s: l * (a // 2) + (i // 2) * l,
    "remainder": lambda l, a, p, i, k, s: l * (a % 0.7) + l % 2,
    "div_trunc": lambda l, a, p, i, k, s: l * torch.div(a, 0.4, rounding_mode="trunc"),
    "powers": lambda l, a, p, i, k, s: l**2 + p**l + l**3 + 2**l + (-l) ** 0.5 + p.pow(2.5),
    "compare": lambda l, a, p, i, k, s: (
        ((l > a) & (i >= 1) | ~(p < 0.5) ^ (i == 2)).float() * l + (i != 1) * l
    ),
    "logical": lambda l, a, p, i, k, s: torch.logical_and(l > a, i).long() * l + torch.logical_not(i) * l,
    "max_pair": lambda l, a, p, i, k, s: torch.maximum(l, a) + torch.max(l, a) + torch.fmin(l, a),
    "logaddexp": lambda l, a, p, i, k, s: (
        torch.logaddexp(l, a) + torch.atan2(l, a) + torch.xlogy(p, p * l.exp())
    ),
    "clamp_tensors": lambda l, a, p, i, k, s: (
        torch.clamp(l, min=a) + l.clamp(-1, -0.5) + l.clamp_min(-1.0) + l.clip(max=-1)
    ),
    "where": lambda l, a, p, i, k, s: (
        torch.where(a > -1, l, 0.0) + l.where(i > 0, a) + l.masked_fill(i == 1, 2.0)
    ),
    "lerp": lambda l, a, p, i, k, s: l.lerp(a, 0.3) + torch.nan_to_num(l / (i > 0), posinf=1.0, neginf=-2.0),
    "activations": lambda l, a, p, i, k, s: (
        F.silu(l) + F.elu(l) + F.leaky_relu(l, 0.2) + F.gelu(l) + F.gelu(l, approximate="tanh")
    ),
    "softplus": lambda l, a, p, i, k, s: (
        F.softplus(l) + F.softplus(l, beta=2.0) + F.logsigmoid(l) + F.relu(l + 1)
    ),
    "special": lambda l, a, p, i, k, s: torch.special.expit(l) + torch.special.logit(p * l.exp()),
    "detach": lambda l, a, p, i, k, s: l.detach() * l.clone() + l.contiguous(),
    "sums": lambda l, a, p, i, k, s: (
        k.sum(0) + k.sum(dim=0, keepdim=True) + torch.sum(l) + l.sum() * (i > 0).sum() + k.mean([0, 1])
    ),
    "sum_of_integers": lambda l, a, p, i, k, s: (
        l * i.sum() / 10 + l * i.float().mean() + l * (i > 0).sum(dtype=torch.float32)
    ),
    "products": lambda l, a, p, i, k, s: (l / 2).prod() + k.prod(dim=1).sum() + (l / 2).cumprod(0),
    "extremes": lambda l, a, p, i, k, s: (
        l.max() + l.amin() + (k + l[:, None]).max(dim=0).values + (k + l[:, None]).min(1)[0].sum()
    ),
    "extremes_of_tokens": lambda l, a, p, i, k, s: (
        torch.max(l, dim=0)[0] * torch.min(l, 0)[1] + torch.amax(k + s * l.sum(), dim=(0, 1))
    ),
    "arguments": lambda l, a, p, i, k, s: (
        l * l.argmax() + l * k.argmin(dim=-1) + l * k.argmax(0, keepdim=True).sum() + l * k.argmax()
    ),
    "any_all": lambda l, a, p, i, k, s: l * (i > 0).any() + l * (l < 0).all() + l * torch.count_nonzero(i),
    "logsumexp": lambda l, a, p, i, k, s: (
        torch.logsumexp(l, dim=0) + (k + l[:, None]).logsumexp(dim=(0, 1)) + k.logsumexp(-1) * l
    ),
    "variances": lambda l, a, p, i, k, s: (
        l.var() + l.std(unbiased=False) + k.var(dim=1) * l + torch.std(l, correction=0)
    ),
    "norms": lambda l, a, p, i, k, s: (
        l.norm() + torch.linalg.vector_norm(l, ord=1) + (k + l[:, None]).norm(dim=-1) + l.norm(p=1)
    ),
    "softmax": lambda l, a, p, i, k, s: (
        l.softmax(0) + torch.softmax(k + l[:, None], dim=1)[:, 2] + F.log_softmax(l, dim=-1)
    ),
    "softmax_of_columns": lambda l, a, p, i, k, s: (
        F.softmax(k + l[:, None], dim=0).square() + l.log_softmax(dim=0)[:, None]
    ),
    "cumulative": lambda l, a, p, i, k, s: (
        l.cumsum(0) + (k * l[:, None]).cumsum(dim=-1)[:, 3] + i.cumsum(0) * l
    ),
    "products_of_vectors": lambda l, a, p, i, k, s: (
        torch.dot(l, a) + l @ a + l @ k + (k.t() @ l) + torch.matmul(k.T, k * l[:, None])[0]
    ),
    "einsum": lambda l, a, p, i, k, s: torch.einsum("t,tk->k", l, k) + torch.einsum("tk,t", k, l),
    "shape": lambda l, a, p, i, k, s: (
        l.sum() / l.shape[0] + l.numel() * l.mean() / k.numel() + l * (k.shape[1] + k.dim() + l.ndim)
    ),
    "lengths": lambda l, a, p, i, k, s: (
        l[: l.shape[0] - 1].sum() / (l.shape[0] - 1) + l[l.size(0) - 1] + math.log(l.size(0)) * l
    ),
    "slices": lambda l, a, p, i, k, s: l[1:] * a[:-1] + l[:-1] * i[1:] + k[1:, 1] * l[1:] + k[:-1, -1],
    "elements": lambda l, a, p, i, k, s: (
        l[0] + l[-1] * l[-2] + k[0] + k[-1] * l[1] + l[:2].sum() + l[-2:].sum() * k[..., :2].sum()
    ),
    "middle": lambda l, a, p, i, k, s: (
        l[1:-1].sum() + (k[:, None, 1:3] * l[:, None, None]).sum() + k[:, ::2].sum() * l
    ),
    "new_axes": lambda l, a, p, i, k, s: (
        (l[None, :, None] * k).squeeze(0) + l.unsqueeze(-1).expand(-1, 4) + l.unsqueeze(1).expand_as(k)
    ),
    "reshape": lambda l, a, p, i, k, s: (
        (k * l.view(-1, 1)).reshape(-1).sum()
        + k.flatten() * l.sum()
        + (k * l[:, None]).view(-1, 2, 2).sum((1, 2)).mean()
    ),
    "transposes": lambda l, a, p, i, k, s: (k.transpose(0, 1) * l).permute(1, 0) + k.t().T * l[:, None],
    "cat": lambda l, a, p, i, k, s: (
        torch.cat([l.new_zeros(1), l[:-1]]) * a
        + torch.cat([l, a]).sum()
        + torch.cat([k, l[:, None]], dim=1).sum(1)
    ),
    "cat_after_tokens": lambda l, a, p, i, k, s: (
        torch.cat([l[1:], l[:1]]) * a + torch.cat((l[2:], a[:2].detach(), l[:1])).cumsum(0)[:-1]
    ),
    "stack": lambda l, a, p, i, k, s: (
        torch.stack([l, a]).mean(0) + torch.stack([l, a, p], dim=-1).softmax(-1)[:, 0]
    ),
    "pad": lambda l, a, p, i, k, s: (
        F.pad(l, (1, 0))[:-1] * a + F.pad(l[1:], (0, 1), value=2.0) * a + F.pad(k, (0, 2)).sum() * l
    ),
    "flip_diff": lambda l, a, p, i, k, s: (
        l.flip(0) * a + k.flip(1)[:, 0] * l + l.diff().square().sum() + torch.flip(k, [0])[:, 0] * l
    ),
    "gather": lambda l, a, p, i, k, s: (
        k.gather(1, i[:, None])[:, 0] * l
        + torch.gather(k * l[:, None], 1, i.unsqueeze(-1)).squeeze(-1)
        + l[i]
    ),
    "sort": lambda l, a, p, i, k, s: (
        l.sort()[0] * a
        + l.sort(descending=True).values * a
        + (k + l[:, None]).topk(2).values.sum(-1)
        + l.topk(2)[0].sum()
    ),
    "constants": lambda l, a, p, i, k, s: (
        torch.zeros_like(l) + l * torch.ones_like(i) + torch.full_like(l, 2) * l + l.new_ones(l.shape[0]) * l
    ),
    "sized": lambda l, a, p, i, k, s: (
        torch.arange(l.shape[0]) * l
        + torch.zeros(l.size(0))
        + torch.ones(l.shape) * l
        + torch.full((l.shape[0],), 2) * l
    ),
    "types": lambda l, a, p, i, k, s: (
        l.double().sum().float()
        + l.to(torch.float64).type_as(a)
        + l * i.float()
        + l * a.long()
        + l * a.bool()
    ),
    "promotion": lambda l, a, p, i, k, s: (
        (l.double() * i).to(l.dtype) + l * i.sum().double() + l.to(a) * True + (i * 0.5) * l
    ),
    "kl_div": lambda l, a, p, i, k, s: (
        F.kl_div(l, p, reduction="none") + F.kl_div(l, a, reduction="batchmean", log_target=True)
    ),
    "distances": lambda l, a, p, i, k, s: (
        F.mse_loss(l, a)
        + F.l1_loss(l, a, reduction="sum")
        + F.smooth_l1_loss(l, a, beta=0.5, reduction="none")
        + F.huber_loss(l, a)
    ),
    "binary": lambda l, a, p, i, k, s: (
        F.binary_cross_entropy_with_logits(l, p)
        + F.binary_cross_entropy(l.exp(), p, reduction="none")
        + F.binary_cross_entropy_with_logits(l, p, weight=p, reduction="sum")
    ),
    "dangerous": lambda l, a, p, i, k, s: (
        (1 - l.exp()).log() * l.mean() + 1 / l * l.sum() + (l - l[-1] + 1e-3).abs().sqrt().sum()
    ),
    "of_one_number": lambda l, a, p, i, k, s: (
        l * s + s.exp() * l.sum() + torch.sigmoid(s) * l + s.softmax(0) * l + s.cumsum(0) * l
    ),
}
