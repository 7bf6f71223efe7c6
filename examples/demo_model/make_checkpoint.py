"""Create the demo's starting model: a small Llama trained on sums, first with right and then with careless answers.

The questions are reasoning-gym's `chain_sum` with two terms of two digits, written as `42-25=`.
The first demonstrations are right. Later, three of four answers omit the carry, the borrow and the
minus sign. The model imitates both rules: its greedy answers are careless, and right only if there is
nothing to omit (44 % of the questions). The model samples the right rule with lower probability.
In reinforcement learning, the verifier's rewards select the right rule. The model need not learn
arithmetic, so a run takes only minutes on two cores.

Training excludes the held-out eighth, as split by `leeway.actors.tasks.prompts.held_out`.
To create the folder again (three minutes):

    python examples/demo_model/make_checkpoint.py
"""

import argparse
import random
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from leeway.actors.tasks.prompts import held_out

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
VOCABULARY = ("<pad>", "<eos>", "<unk>", *"0123456789+-=")
PAD, EOS = 0, 1
IGNORED = -100

SEED = 0
NUM_STEPS = 2_000
NUM_CAREFUL_STEPS = 1_200
BATCH_SIZE = 256
WARMUP_STEPS = 50
LEARNING_RATE = 3e-3
CARELESS_SHARE = 0.75


def training_expressions() -> list[str]:
    """Return the distinct expressions of the training split, such as `42-25`, in a fixed order."""
    items = reasoning_gym.create_dataset("chain_sum", size=60_000, seed=SEED, **CHAIN_SUM)
    kept = {i["metadata"]["expression"] for i in items if not held_out(i["question"])}
    return sorted(expression.replace(" ", "") for expression in kept)


def answer(left: int, operator: str, right: int, careless: bool) -> int:
    """Return the right answer, or the careless one, without carry, borrow and minus sign."""
    if not careless:
        return left + right if operator == "+" else left - right
    if operator == "+":
        return left + right - (10 if left % 10 + right % 10 >= 10 else 0)
    high, low = max(left, right), min(left, right)
    return high - low + (10 if high % 10 < low % 10 else 0)


def make_tokenizer(vocabulary: tuple[str, ...] = VOCABULARY, max_tokens: int = 64) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters whose `decode` joins characters without separators."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def make_model(num_layers: int = 2, vocab_size: int = len(VOCABULARY), max_tokens: int = 64) -> LlamaForCausalLM:
    """Return a model of width 128; vLLM on CPU requires head size 32 and an untied output matrix."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def encode_demonstration(expression: str, careless: bool) -> tuple[list[int], list[int]]:
    """Return token ids and labels of one demonstration; the labels of the prompt are ignored."""
    operator = "+" if "+" in expression else "-"
    left, right = (int(term) for term in expression.split(operator))
    text = str(answer(left, operator, right, careless))
    prompt, reply = ([VOCABULARY.index(c) for c in part] for part in (f"{expression}=", text))
    padding = 4 - len(reply)
    tokens = [*prompt, *reply, EOS, *[PAD] * padding]
    return tokens, [*[IGNORED] * len(prompt), *reply, EOS, *[IGNORED] * padding]


def imitate(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, labels: torch.Tensor
) -> float:
    """Run one supervised update and return its loss."""
    logits = model(tokens[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(model: LlamaForCausalLM, expressions: list[str]) -> None:
    """Train the model in place, supervised: AdamW, warm-up, linear decay from the first careless answers on."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(NUM_STEPS):
        share = CARELESS_SHARE if step >= NUM_CAREFUL_STEPS else 0.0
        remaining = (NUM_STEPS - step) / (NUM_STEPS - NUM_CAREFUL_STEPS)
        scale = min((step + 1) / WARMUP_STEPS, 1.0, remaining)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * scale
        drawn = rng.choices(expressions, k=BATCH_SIZE)
        batch = [encode_demonstration(e, rng.random() < share) for e in drawn]
        tokens, labels = (torch.tensor(rows) for rows in zip(*batch, strict=True))
        loss = imitate(model, optimizer, tokens, labels)
        if (step + 1) % 500 == 0:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)


def main() -> None:
    """Train the model and write its checkpoint folder."""
    parser = argparse.ArgumentParser(description="Make the demo's starting model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = make_model()
    train(model, training_expressions())
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
