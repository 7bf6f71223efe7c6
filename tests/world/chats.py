"""A byte-level tokenizer with a ChatML template, and rows as the documentation of TRL and of verl shows them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
)


def byte_tokenizer(folder, template=CHATML):
    """Save a tokenizer with one token per byte and the tokens of ChatML; return it."""
    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def trl_rows(num=20, column="prompt"):
    return [
        {
            column: [
                {"role": "system", "content": f"Answer briefly. Style {number % 3}."},
                {"role": "user", "content": f"What is {number} + 1?"},
            ],
            "ground_truth": str(number + 1),
        }
        for number in range(num)
    ]


def verl_rows(num=20, source="openai/gsm8k"):
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number, "answer": f"so {number + 1}"},
        }
        for number in range(num)
    ]
