"""Train a tiny, randomly initialized Llama with transformers.Trainer.

python hf_trainer.py OUTPUT_DIR MAX_STEPS SAVE_STEPS

It resumes from the last checkpoint in OUTPUT_DIR if there is one, as the library's examples do.
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

output_dir, max_steps, save_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Counting(torch.utils.data.Dataset):
    """Sequences that count up, each from its index."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.004)  # a step takes some 30 ms
        ids = (torch.arange(16) + index) % 64
        return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=output_dir,
    max_steps=max_steps,
    save_steps=save_steps,
    save_total_limit=2,
    logging_steps=10,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    seed=7,
    use_cpu=True,
    ddp_backend="gloo",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Counting())
trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))
trainer.save_state()
trainer.save_model()
