"""peft: adapters on a frozen base, merged and switched off between steps."""

from collections.abc import Callable

import torch
from torch import nn

from ecosystem.training import scenario, token_ids, train
from ecosystem.with_transformers import blocks, checkpointed_llama, llama
from support.arms import Run, Scenario

PACKAGES = ("peft", "transformers")
IMPORTS = (
    "peft",
    "peft.tuners.lora.dora",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
)


def adapted(base: Callable[[], nn.Module] = llama, **config) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        wanted = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1}
        # B starts at zero otherwise, and then A and the magnitudes have little to do.
        return get_peft_model(base(), LoraConfig(**wanted, init_lora_weights=False, **config))

    return model


def shard_on(*mesh: int) -> Callable[[Run], None]:
    def shard(run: Run) -> None:
        # The model inside is the root, so that it still is one when the adapters are unloaded.
        root = run.module.get_base_model()
        run.fully_shard(*blocks(root), root, mesh=run.mesh(*mesh))

    return shard


def evaluate(run: Run, key: str) -> None:
    ids = token_ids(run, 50)
    run.module.eval()
    with torch.no_grad():
        run.record(f"{key}/logits", run.module(input_ids=ids).logits)
    run.module.train()
    for module in run.fsdp_modules():
        module.reshard()  # the root stays unsharded after a forward without a backward


def merge(run: Run, step: int) -> None:
    run.module.merge_adapter()
    evaluate(run, f"{step}/merged")
    run.module.unmerge_adapter()
    evaluate(run, f"{step}/unmerged")


def switch_off(run: Run, step: int) -> None:
    with run.module.disable_adapter():
        evaluate(run, f"{step}/off")
    evaluate(run, f"{step}/on")


def merge_for_good(run: Run, step: int) -> None:
    """After the last step the adapters become part of the base."""
    if step == 2:
        merged = run.module.merge_and_unload()
        run.record("unloaded", type(merged).__name__.removeprefix("FSDP"))
        run.module = run.forward = merged
        evaluate(run, "merged for good")


def _scenario(name: str, model, between=None, mesh: tuple[int, ...] = (1,), **kwargs) -> Scenario:
    return scenario(
        "peft", name, model=model, shard=shard_on(*mesh), steps=train(between=between), **kwargs
    )


SCENARIOS = [
    _scenario("LoRA", adapted()),
    _scenario("LoRA, (2, 1) mesh", adapted(), mesh=(2, 1), world=2, replicas=2),
    _scenario("LoRA, merge and unmerge", adapted(), merge),
    _scenario("LoRA, adapters off and on", adapted(), switch_off),
    _scenario("LoRA, merged for good", adapted(), merge_for_good),
    _scenario("LoRA, checkpointing", adapted(checkpointed_llama), switch_off),
    _scenario("DoRA", adapted(use_dora=True)),
    # DoRA's merge assigns to ``.data``. On a DTensor that changes nothing, so the merge is lost on
    # stock as well, and there is no plain model to compare with.
    _scenario("DoRA, merge and unmerge", adapted(use_dora=True), merge, like_plain=False),
    _scenario("DoRA, adapters off and on", adapted(use_dora=True), switch_off),
]  # fmt: skip
