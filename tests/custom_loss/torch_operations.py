"""One small loss per operation, and per way to call it, to compare with torch."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 (everybody's name for it)

# Of x (logprobs) and a, [T]; p, in (0, 1), [T]; i, integers 0 to 2, [T]; k [T, 4]; s, a number.
UNARY = {
    name: lambda x, a, p, i, k, s, name=name: getattr(p * x.exp(), name)()
    for name in (
        "abs acos asin asinh atan ceil cos cosh erf exp exp2 expm1 floor log log10 log1p log2 logit neg "
        "reciprocal relu round "
        "rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
    ).split()
}

OPERATIONS = UNARY | {
    "add_alpha": lambda x, a, p, i, k, s: torch.add(x, a, alpha=2),
    "sub_method": lambda x, a, p, i, k, s: x.sub(a).mul(2).div(s),
    "rsub": lambda x, a, p, i, k, s: 1 - x / a,
    "integer_division": lambda x, a, p, i, k, s: x * (i / (i + 1)),
    "floor_divide": lambda x, a, p, i, k, s: x * (a // 2) + (i // 2) * x,
    "remainder": lambda x, a, p, i, k, s: x * (a % 0.7) + x % 2,
    "div_trunc": lambda x, a, p, i, k, s: x * torch.div(a, 0.4, rounding_mode="trunc"),
    "powers": lambda x, a, p, i, k, s: x**2 + p**x + x**3 + 2**x + (-x) ** 0.5 + p.pow(2.5),
    "compare": lambda x, a, p, i, k, s: (
        ((x > a) & (i >= 1) | ~(p < 0.5) ^ (i == 2)).float() * x + (i != 1) * x
    ),
    "logical": lambda x, a, p, i, k, s: torch.logical_and(x > a, i).long() * x + torch.logical_not(i) * x,
    "max_pair": lambda x, a, p, i, k, s: torch.maximum(x, a) + torch.max(x, a) + torch.fmin(x, a),
    "logaddexp": lambda x, a, p, i, k, s: (
        torch.logaddexp(x, a) + torch.atan2(x, a) + torch.xlogy(p, p * x.exp())
    ),
    "clamp_tensors": lambda x, a, p, i, k, s: (
        torch.clamp(x, min=a) + x.clamp(-1, -0.5) + x.clamp_min(-1.0) + x.clip(max=-1)
    ),
    "where": lambda x, a, p, i, k, s: (
        torch.where(a > -1, x, 0.0) + x.where(i > 0, a) + x.masked_fill(i == 1, 2.0)
    ),
    "lerp": lambda x, a, p, i, k, s: x.lerp(a, 0.3) + torch.nan_to_num(x / (i > 0), posinf=1.0, neginf=-2.0),
    "activations": lambda x, a, p, i, k, s: (
        F.silu(x) + F.elu(x) + F.leaky_relu(x, 0.2) + F.gelu(x) + F.gelu(x, approximate="tanh")
    ),
    "softplus": lambda x, a, p, i, k, s: (
        F.softplus(x) + F.softplus(x, beta=2.0) + F.logsigmoid(x) + F.relu(x + 1)
    ),
    "special": lambda x, a, p, i, k, s: torch.special.expit(x) + torch.special.logit(p * x.exp()),
    "detach": lambda x, a, p, i, k, s: x.detach() * x.clone() + x.contiguous(),
    "sums": lambda x, a, p, i, k, s: (
        k.sum(0) + k.sum(dim=0, keepdim=True) + torch.sum(x) + x.sum() * (i > 0).sum() + k.mean([0, 1])
    ),
    "sum_of_integers": lambda x, a, p, i, k, s: (
        x * i.sum() / 10 + x * i.float().mean() + x * (i > 0).sum(dtype=torch.float32)
    ),
    "products": lambda x, a, p, i, k, s: (x / 2).prod() + k.prod(dim=1).sum() + (x / 2).cumprod(0),
    "extremes": lambda x, a, p, i, k, s: (
        x.max() + x.amin() + (k + x[:, None]).max(dim=0).values + (k + x[:, None]).min(1)[0].sum()
    ),
    "extremes_of_tokens": lambda x, a, p, i, k, s: (
        torch.max(x, dim=0)[0] * torch.min(x, 0)[1] + torch.amax(k + s * x.sum(), dim=(0, 1))
    ),
    "arguments": lambda x, a, p, i, k, s: (
        x * x.argmax() + x * k.argmin(dim=-1) + x * k.argmax(0, keepdim=True).sum() + x * k.argmax()
    ),
    "any_all": lambda x, a, p, i, k, s: x * (i > 0).any() + x * (x < 0).all() + x * torch.count_nonzero(i),
    "logsumexp": lambda x, a, p, i, k, s: (
        torch.logsumexp(x, dim=0) + (k + x[:, None]).logsumexp(dim=(0, 1)) + k.logsumexp(-1) * x
    ),
    "variances": lambda x, a, p, i, k, s: (
        x.var() + x.std(unbiased=False) + k.var(dim=1) * x + torch.std(x, correction=0)
    ),
    "norms": lambda x, a, p, i, k, s: (
        x.norm() + torch.linalg.vector_norm(x, ord=1) + (k + x[:, None]).norm(dim=-1) + x.norm(p=1)
    ),
    "softmax": lambda x, a, p, i, k, s: (
        x.softmax(0) + torch.softmax(k + x[:, None], dim=1)[:, 2] + F.log_softmax(x, dim=-1)
    ),
    "softmax_of_columns": lambda x, a, p, i, k, s: (
        F.softmax(k + x[:, None], dim=0).square() + x.log_softmax(dim=0)[:, None]
    ),
    "cumulative": lambda x, a, p, i, k, s: (
        x.cumsum(0) + (k * x[:, None]).cumsum(dim=-1)[:, 3] + i.cumsum(0) * x
    ),
    "products_of_vectors": lambda x, a, p, i, k, s: (
        torch.dot(x, a) + x @ a + x @ k + (k.t() @ x) + torch.matmul(k.T, k * x[:, None])[0]
    ),
    "einsum": lambda x, a, p, i, k, s: torch.einsum("t,tk->k", x, k) + torch.einsum("tk,t", k, x),
    "shape": lambda x, a, p, i, k, s: (
        x.sum() / x.shape[0] + x.numel() * x.mean() / k.numel() + x * (k.shape[1] + k.dim() + x.ndim)
    ),
    "lengths": lambda x, a, p, i, k, s: (
        x[: x.shape[0] - 1].sum() / (x.shape[0] - 1) + x[x.size(0) - 1] + math.log(x.size(0)) * x
    ),
    "slices": lambda x, a, p, i, k, s: x[1:] * a[:-1] + x[:-1] * i[1:] + k[1:, 1] * x[1:] + k[:-1, -1],
    "elements": lambda x, a, p, i, k, s: (
        x[0] + x[-1] * x[-2] + k[0] + k[-1] * x[1] + x[:2].sum() + x[-2:].sum() * k[..., :2].sum()
    ),
    "middle": lambda x, a, p, i, k, s: (
        x[1:-1].sum() + (k[:, None, 1:3] * x[:, None, None]).sum() + k[:, ::2].sum() * x
    ),
    "new_axes": lambda x, a, p, i, k, s: (
        (x[None, :, None] * k).squeeze(0) + x.unsqueeze(-1).expand(-1, 4) + x.unsqueeze(1).expand_as(k)
    ),
    "reshape": lambda x, a, p, i, k, s: (
        (k * x.view(-1, 1)).reshape(-1).sum()
        + k.flatten() * x.sum()
        + (k * x[:, None]).view(-1, 2, 2).sum((1, 2)).mean()
    ),
    "transposes": lambda x, a, p, i, k, s: (k.transpose(0, 1) * x).permute(1, 0) + k.t().T * x[:, None],
    "cat": lambda x, a, p, i, k, s: (
        torch.cat([x.new_zeros(1), x[:-1]]) * a
        + torch.cat([x, a]).sum()
        + torch.cat([k, x[:, None]], dim=1).sum(1)
    ),
    "cat_after_tokens": lambda x, a, p, i, k, s: (
        torch.cat([x[1:], x[:1]]) * a + torch.cat((x[2:], a[:2].detach(), x[:1])).cumsum(0)[:-1]
    ),
    "stack": lambda x, a, p, i, k, s: (
        torch.stack([x, a]).mean(0) + torch.stack([x, a, p], dim=-1).softmax(-1)[:, 0]
    ),
    "pad": lambda x, a, p, i, k, s: (
        F.pad(x, (1, 0))[:-1] * a + F.pad(x[1:], (0, 1), value=2.0) * a + F.pad(k, (0, 2)).sum() * x
    ),
    "flip_diff": lambda x, a, p, i, k, s: (
        x.flip(0) * a + k.flip(1)[:, 0] * x + x.diff().square().sum() + torch.flip(k, [0])[:, 0] * x
    ),
    "gather": lambda x, a, p, i, k, s: (
        k.gather(1, i[:, None])[:, 0] * x
        + torch.gather(k * x[:, None], 1, i.unsqueeze(-1)).squeeze(-1)
        + x[i]
    ),
    "sort": lambda x, a, p, i, k, s: (
        x.sort()[0] * a
        + x.sort(descending=True).values * a
        + (k + x[:, None]).topk(2).values.sum(-1)
        + x.topk(2)[0].sum()
    ),
    "constants": lambda x, a, p, i, k, s: (
        torch.zeros_like(x) + x * torch.ones_like(i) + torch.full_like(x, 2) * x + x.new_ones(x.shape[0]) * x
    ),
    "sized": lambda x, a, p, i, k, s: (
        torch.arange(x.shape[0]) * x
        + torch.zeros(x.size(0))
        + torch.ones(x.shape) * x
        + torch.full((x.shape[0],), 2) * x
    ),
    "types": lambda x, a, p, i, k, s: (
        x.double().sum().float()
        + x.to(torch.float64).type_as(a)
        + x * i.float()
        + x * a.long()
        + x * a.bool()
    ),
    "promotion": lambda x, a, p, i, k, s: (
        (x.double() * i).to(x.dtype) + x * i.sum().double() + x.to(a) * True + (i * 0.5) * x
    ),
    "kl_div": lambda x, a, p, i, k, s: (
        F.kl_div(x, p, reduction="none") + F.kl_div(x, a, reduction="batchmean", log_target=True)
    ),
    "distances": lambda x, a, p, i, k, s: (
        F.mse_loss(x, a)
        + F.l1_loss(x, a, reduction="sum")
        + F.smooth_l1_loss(x, a, beta=0.5, reduction="none")
        + F.huber_loss(x, a)
    ),
    "binary": lambda x, a, p, i, k, s: (
        F.binary_cross_entropy_with_logits(x, p)
        + F.binary_cross_entropy(x.exp(), p, reduction="none")
        + F.binary_cross_entropy_with_logits(x, p, weight=p, reduction="sum")
    ),
    "dangerous": lambda x, a, p, i, k, s: (
        (1 - x.exp()).log() * x.mean() + 1 / x * x.sum() + (x - x[-1] + 1e-3).abs().sqrt().sum()
    ),
    "of_one_number": lambda x, a, p, i, k, s: (
        x * s + s.exp() * x.sum() + torch.sigmoid(s) * x + s.softmax(0) * x + s.cumsum(0) * x
    ),
}
