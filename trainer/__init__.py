"""The bundled trainers, written as a user would write them on top of `holdfast`.

    python -m trainer.gpt       a small GPT on the bytes of real text
    python -m trainer.vision    a small ResNet on scikit-learn's digits, or on made images

Each runs alone, under torchrun and under `holdfast run`; `--help` lists the options. Both resume
bit for bit: the last line, `digest <hex>`, is equal for two runs that ended in equal states.
"""
