"""The bundled trainers, written as a user would write them on top of `holdfast`.

    python -m trainer.gpt       a small GPT on the bytes of real text
    python -m trainer.vision    a small ResNet on scikit-learn's digits, or on generated images

Each can run on its own, under torchrun, or under `holdfast run`; `--help` lists the options. A resumed run is
bit-identical to an uninterrupted one: its last line, `digest <hex>`, depends only on the final state.
"""
