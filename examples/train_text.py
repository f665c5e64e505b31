"""Trains a small byte-level language model of Gated DeltaNet layers on a text file, on the CPU, in about three minutes.

    python examples/train_text.py [TEXT_FILE] [--short] [--output-dir out]

Without a file it reads the language reference that every Python installation carries (pydoc_data.topics). Printed at
the end: the held-out loss beside what byte bigrams reach on the same text, a sample written by the recurrent decode
step, and a comparison of one layer's outputs and gradients with the float64 reference. Exit status 1 if any of these
does not hold. The loss curve goes to OUTPUT_DIR/loss.png.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, reference_gated_delta_rule

VOCABULARY = 256  # bytes


# ---- the model ------------------------------------------------------------------------------------------------------


@dataclass
class LayerCache:
    """What a layer remembers between calls while decoding."""

    conv_tail: Tensor  # [B, kernel - 1, channels], the last inputs of the convolution
    state: Tensor | None  # [B, HV, K, V] fp32


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, with SiLU: every channel mixes its own last few tokens."""

    def __init__(self, channels: int, kernel: int = 4) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.randn(kernel, channels) / math.sqrt(kernel))

    def forward(self, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        if tail is None:
            tail = x.new_zeros(x.shape[0], self.kernel - 1, x.shape[2])
        padded = torch.cat([tail, x], dim=1)
        tokens = x.shape[1]
        mixed = sum(padded[:, i : i + tokens] * self.weight[i] for i in range(self.kernel))
        return F.silu(mixed), padded[:, tokens:]


class GatedDeltaNet(nn.Module):
    """Projections and short convolution, the gated delta rule, gated RMSNorm of its output, projection back."""

    def __init__(self, width: int, heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.heads, self.value_heads, self.key_dim, self.value_dim = heads, value_heads, key_dim, value_dim
        self.split = [heads * key_dim, heads * key_dim, value_heads * value_dim]
        self.qkv = nn.Linear(width, sum(self.split), bias=False)
        self.conv = ShortConvolution(sum(self.split))
        self.raw_gate = nn.Linear(width, value_heads, bias=False)
        self.beta_logit = nn.Linear(width, value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(1, 16).log())
        step = torch.empty(value_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.output_gate = nn.Linear(width, value_heads * value_dim, bias=False)
        self.norm = nn.RMSNorm(value_dim, eps=1e-5)
        self.out = nn.Linear(value_heads * value_dim, width, bias=False)

    def operator_inputs(self, x: Tensor, tail: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        mixed, tail = self.conv(self.qkv(x), tail)
        # q, k and v stay views of one tensor: the operator takes any strides.
        q, k, v = mixed.split(self.split, dim=-1)
        inputs = {
            "q": q.unflatten(-1, (self.heads, self.key_dim)),
            "k": k.unflatten(-1, (self.heads, self.key_dim)),
            "v": v.unflatten(-1, (self.value_heads, self.value_dim)),
            "g": self.raw_gate(x),
            "beta": self.beta_logit(x),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
        }
        return inputs, tail

    def forward(self, x: Tensor, cache: LayerCache | None = None, decode: bool = False) -> tuple[Tensor, LayerCache]:
        inputs, tail = self.operator_inputs(x, cache.conv_tail if cache else None)
        operator = fused_recurrent_gated_delta_rule if decode else chunk_gated_delta_rule
        o, state = operator(
            **inputs,
            initial_state=cache.state if cache else None,
            output_final_state=not self.training,
            **OPERATOR_FLAGS,
        )
        gate = self.output_gate(x).unflatten(-1, (self.value_heads, self.value_dim))
        o = self.norm(o) * F.silu(gate)
        return self.out(o.flatten(-2)), LayerCache(tail, state)


OPERATOR_FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, width: int, **layer: int) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(width, eps=1e-5)
        self.mixer = GatedDeltaNet(width, **layer)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = Mlp(width, 2 * width)

    def forward(self, x: Tensor, cache: LayerCache | None, decode: bool) -> tuple[Tensor, LayerCache]:
        mixed, cache = self.mixer(self.mixer_norm(x), cache, decode)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class ByteModel(nn.Module):
    def __init__(self, width: int, layers: int, **layer: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, **layer) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # both writers of a block start small, so that depth does not scale the sum up
            for writer in (block.mixer.out, block.mlp.down):
                nn.init.normal_(writer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(
        self, tokens: Tensor, caches: list[LayerCache] | None = None, decode: bool = False
    ) -> tuple[Tensor, list[LayerCache]]:
        x = self.embedding(tokens)
        new_caches = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, caches[i] if caches else None, decode)
            new_caches.append(cache)
        return self.head(self.norm(x)), new_caches


# ---- text and baselines ---------------------------------------------------------------------------------------------


def default_text() -> bytes:
    """Python's language reference. Topics share passages, so each paragraph is kept once: the held-out part must not
    repeat what the training part says."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}
    for topic in topics.values():
        for paragraph in topic.strip().split("\n\n"):
            if paragraph.strip():
                paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(paragraphs.values()).encode()


def read_text(path: Path | None) -> tuple[bytes, str]:
    if path is None:
        return default_text(), "Python language reference (pydoc_data.topics)"
    return path.read_bytes(), str(path)


@dataclass
class Baselines:
    """What models of single bytes and of byte pairs reach on the held-out text, in nats a byte."""

    unigram: float
    bigram_model: float  # pair frequencies of the training text, one added to each count
    bigram_entropy: float  # H(byte | byte before it) of the held-out text itself: below what any bigram model can reach

    @staticmethod
    def measure(train: bytes, held_out: bytes) -> Baselines:
        singles, pairs = Counter(train), Counter(itertools.pairwise(train))
        own_firsts = Counter(held_out[:-1])
        own_pairs = Counter(itertools.pairwise(held_out))
        count = len(held_out) - 1
        unigram = model = entropy = 0.0
        for (first, second), times in own_pairs.items():
            unigram -= times * math.log((singles[second] + 1) / (len(train) + VOCABULARY))
            model -= times * math.log((pairs[first, second] + 1) / (singles[first] + VOCABULARY))
            entropy -= times * math.log(times / own_firsts[first])
        return Baselines(unigram / count, model / count, entropy / count)


def to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def random_batch(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


# ---- training, evaluation, decoding ---------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: ByteModel, text: Tensor, length: int, limit: int | None = None) -> float:
    """Nats a byte over windows of `length`, each read from an empty state; `limit` takes that many, evenly spread."""
    model.eval()
    windows = (len(text) - 1) // length
    inputs = text[: windows * length].view(windows, length)
    targets = text[1 : windows * length + 1].view(windows, length)
    if limit is not None and limit < windows:
        chosen = torch.linspace(0, windows - 1, limit).long()
        inputs, targets = inputs[chosen], targets[chosen]
    total = 0.0
    for part, target in zip(inputs.split(32), targets.split(32), strict=True):
        logits, _ = model(part)
        total += F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum").item()
    model.train()
    return total / targets.numel()


@dataclass
class History:
    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]


def train(model: ByteModel, text: Tensor, held_out: Tensor, options: argparse.Namespace) -> History:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]  # norms, A_log, dt_bias
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
    )
    warmup = max(1, options.steps // 20)

    def learning_rate_factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, options.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    generator = torch.Generator().manual_seed(options.seed)
    history = History([], [])
    bar = tqdm(range(1, options.steps + 1), desc="training", unit="step", mininterval=1.0)
    for step in bar:
        inputs, targets = random_batch(text, options.batch, options.length, generator)
        logits, _ = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        history.train.append((step, loss.item()))
        if step % max(1, options.steps // 10) == 0:
            history.held_out.append((step, held_out_loss(model, held_out, options.length, limit=32)))
        shown = {"loss": f"{loss.item():.3f}"}
        if history.held_out:
            shown["held-out"] = f"{history.held_out[-1][1]:.3f}"
        bar.set_postfix(shown, refresh=False)
    return history


@torch.no_grad()
def generate(model: ByteModel, prompt: bytes, count: int, temperature: float, seed: int) -> tuple[bytes, float]:
    """Reads the prompt in one chunked pass, then writes byte by byte from the cached states. Also returns the largest
    difference between the logits of the chunked pass and of the same prompt decoded token by token."""
    model.eval()
    tokens = to_tensor(prompt)[None]
    logits, caches = model(tokens)
    step_caches: list[LayerCache] | None = None
    difference = 0.0
    for position in range(tokens.shape[1]):
        step_logits, step_caches = model(tokens[:, position : position + 1], step_caches, decode=True)
        difference = max(difference, (step_logits[0, 0] - logits[0, position]).abs().max().item())

    generator = torch.Generator().manual_seed(seed)
    written = bytearray()
    last = logits[0, -1]
    for _ in range(count):
        choice = torch.multinomial(torch.softmax(last / temperature, dim=-1), 1, generator=generator)
        written.append(int(choice))
        logits, caches = model(choice[None], caches, decode=True)
        last = logits[0, -1]
    model.train()
    return bytes(written), difference


# ---- checks and reports ---------------------------------------------------------------------------------------------


def relative_error(value: Tensor, exact: Tensor) -> float:
    norm = exact.double().norm().item()
    return (value.double() - exact.double()).norm().item() / (norm if norm > 0 else 1.0)


def check_layer(model: ByteModel, tokens: Tensor, tolerance: float = 1e-5) -> bool:
    """Runs the last layer's operator on real activations, forward and backward, beside the float64 reference."""
    with torch.no_grad():
        x = model.embedding(tokens)
        for block in model.blocks[:-1]:
            x, _ = block(x, None, False)
        last = model.blocks[-1]
        inputs, _ = last.mixer.operator_inputs(last.mixer_norm(x), None)

    def run(operator, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}
        o, state = operator(**leaves, output_final_state=True, **OPERATOR_FLAGS)
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (o, state)]
        (o.double() * weights[0]).sum().add((state.double() * weights[1]).sum()).backward()
        results = {"o": o.detach(), "final_state": state.detach()}
        results.update({"d" + name: leaf.grad for name, leaf in leaves.items()})
        return results

    ours = run(chunk_gated_delta_rule, torch.float32)
    exact = run(reference_gated_delta_rule, torch.float64)
    print("\nOne layer against the float64 token recurrence (relative L2 error):")
    good = True
    for name, value in ours.items():
        error = relative_error(value, exact[name])
        limit = tolerance if name in ("o", "final_state") else 2 * tolerance
        good &= error <= limit
        print(f"  {name:12s} {error:9.2e}  (limit {limit:.0e})  {'pass' if error <= limit else 'FAIL'}")
    return good


def plot(history: History, baselines: Baselines, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*history.train, strict=True), color="tab:blue", alpha=0.35, linewidth=1, label="training batch")
    axes.plot(*zip(*history.held_out, strict=True), color="tab:blue", marker="o", label="held-out")
    axes.axhline(baselines.bigram_model, color="tab:orange", linestyle="--", label="byte-bigram model")
    axes.axhline(
        baselines.bigram_entropy, color="tab:red", linestyle=":", label="byte-bigram entropy of the held-out text"
    )
    axes.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, None), title="Gated DeltaNet language model on bytes")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="text file (default: Python's language reference)")
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--short", action="store_true", help="a run of seconds, for continuous integration")
    parser.add_argument("--steps", type=int, help="training steps (default 400; 40 with --short)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens in a training sequence")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 40 if options.short else 400
    if options.text is not None and not options.text.is_file():
        parser.error(f"text: no such file: {options.text}")
    for name in ("steps", "batch", "length", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.width % 64 != 0 or options.width < 64:
        parser.error(f"--width: expected a multiple of 64, got {options.width}")
    return options


def main() -> int:
    options = parse_options()
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    text, source = read_text(options.text)
    if len(text) < 20 * options.length:
        print(f"text: expected at least {20 * options.length} bytes, got {len(text)}", file=sys.stderr)
        return 2
    cut = len(text) * 9 // 10
    baselines = Baselines.measure(text[:cut], text[cut:])
    training, held_out = to_tensor(text[:cut]), to_tensor(text[cut:])

    heads = options.width // 64
    model = ByteModel(options.width, options.layers, heads=heads, value_heads=2 * heads, key_dim=32, value_dim=32)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"text: {source}, {len(training)} bytes to train on, {len(held_out)} held out")
    print(f"model: {options.layers} layers of width {options.width}, {parameters / 1e6:.2f} M parameters")
    print(f"threads: {torch.get_num_threads()}")

    history = train(model, training, held_out, options)
    loss = held_out_loss(model, held_out, options.length)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = options.output_dir / "loss.png"
    plot(history, baselines, picture)

    prompt = text[cut : cut + 128]
    sample, difference = generate(model, prompt, 80 if options.short else 400, temperature=0.7, seed=options.seed)
    print(f"\nSample after the prompt {prompt[-40:].decode(errors='replace')!r}:\n")
    print(sample.decode(errors="replace"))
    decode_good = difference <= 1e-3
    print(
        f"\nLogits of the recurrent decode step against the chunked pass: largest difference {difference:.1e} "
        f"(limit 1e-03)  {'pass' if decode_good else 'FAIL'}"
    )

    layer_good = check_layer(model, held_out[None, : options.length])

    # A short run has not seen enough to beat byte pairs; it must at least have learnt more than letter frequencies.
    limit = baselines.unigram if options.short else baselines.bigram_entropy
    loss_good = loss < 0.95 * limit
    print("\nHeld-out loss, nats a byte (bits):")
    for name, value in (
        ("byte frequencies of the training text", baselines.unigram),
        ("byte-bigram model of the training text", baselines.bigram_model),
        ("byte-bigram entropy of the held-out text", baselines.bigram_entropy),
        ("Gated DeltaNet", loss),
    ):
        print(f"  {name:42s} {value:.3f} ({value / math.log(2):.3f})")
    print(f"  {'pass' if loss_good else 'FAIL'}: the loss must be below {0.95 * limit:.3f}")
    print(f"Loss curve: {picture}. Time: {time.perf_counter() - started:.0f} s.")
    return 0 if loss_good and layer_good and decode_good else 1


if __name__ == "__main__":
    sys.exit(main())
