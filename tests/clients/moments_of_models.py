"""Per-sample moments of models from transformers and timm, against loops over single samples.

python -m tests.clients.moments_of_models [NAME...]

In float64, with tiny random configurations; batch normalisation with its running statistics, which
make samples independent. Fails with what is wrong where a parameter's moment is not the loop's.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from hvd_gradcomp.torch.moments import tracker as moments_tracker

SAMPLES = 3
# As much as the squares of one sample's gradient may differ, and what rounding of zeros gives.
RELATIVE, ABSOLUTE = 1e-5, 1e-9


def text(tokens=40, length=7):
    return torch.randint(1, tokens, (SAMPLES, length))


def images(size):
    return torch.randn(SAMPLES, 3, size, size, dtype=torch.float64)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), {"input_ids": text()}


def gpt2_checkpointed():
    model, inputs = gpt2()
    model.gradient_checkpointing_enable()
    return model, inputs


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=20, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(SAMPLES, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return BertForMaskedLM(config), {"input_ids": text(), "attention_mask": mask}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": text()}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {
        "input_ids": text(),
        "decoder_input_ids": text(length=5),
    }


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": images(16)}


def of_timm(name, size, **options):
    def make():
        import timm

        return timm.create_model(name, num_classes=5, **options), {"x": images(size)}

    return make


MODELS = {
    "gpt2": gpt2,
    "gpt2_checkpointed": gpt2_checkpointed,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "timm_resnet": of_timm("test_resnet", 32),
    "timm_vit": of_timm(
        "vit_tiny_patch16_224", 16, img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2,
        init_values=0.1,
    ),
    "timm_convnext": of_timm("test_convnext", 64),
    "timm_efficientnet": of_timm("test_efficientnet", 32),
    "timm_swin": of_timm(
        "swin_tiny_patch4_window7_224", 32, img_size=32, window_size=4, embed_dim=16, depths=(2, 2),
        num_heads=(2, 4), drop_path_rate=0.0,
    ),
}  # fmt: skip


def loss_of(model, inputs):
    """A mean over samples in which each counts differently."""
    out = next(iter(inputs.values()))
    y = model(**inputs) if "x" not in inputs else model(out)
    y = y if isinstance(y, torch.Tensor) else y.logits
    y = y.reshape(y.shape[0], -1)
    weights = torch.linspace(0.5, 2.0, y.shape[1], dtype=y.dtype)
    return (torch.sin(y) * weights).sum(1).mean()


def looped(model, inputs):
    totals = {name: 0.0 for name, _ in model.named_parameters()}
    for z in range(SAMPLES):
        model.zero_grad()
        loss_of(model, {name: x[z : z + 1] for name, x in inputs.items()}).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                totals[name] = totals[name] + (p.grad / SAMPLES) ** 2
    model.zero_grad()
    return totals


def wrong_in(name):
    """The parameters whose moments are not those of the loop."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    expected = looped(model, inputs)
    wrong = []
    with moments_tracker.track_moments(model, chunk=2) as tracker:
        loss_of(model, inputs).backward()
        for parameter, p in model.named_parameters():
            got, wanted = moments_tracker.take(p), expected[parameter]
            if got is None or isinstance(wanted, float):
                if got is not None or not isinstance(wanted, float):
                    wrong.append(f"{parameter}: {'none' if got is None else 'one'} was found")
                continue
            allowed = RELATIVE * wanted.abs() + ABSOLUTE * (1 + wanted.abs().max())
            if not bool(((got.double() - wanted).abs() <= allowed).all()):
                wrong.append(f"{parameter}: off by {(got - wanted).abs().max() / wanted.max():.1e}")
        if "-v" in sys.argv:
            print(tracker)
    return wrong


def main():
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(MODELS)
    failed = False
    for name in names:
        begin = time.perf_counter()
        wrong = wrong_in(name)
        failed |= bool(wrong)
        verdict = "\n    ".join(wrong) or f"as a loop, {time.perf_counter() - begin:.1f} s"
        print(f"{name}: {verdict}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
