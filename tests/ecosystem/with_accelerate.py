"""accelerate and trl: FSDP version 2 as their users switch it on, as far as a CPU lets them.

On a CPU, accelerate drops its FSDP plugin. So the state of an Accelerator made without it is set to
what it would be, and everything from ``prepare`` on is the library's own code.
"""

from collections.abc import Callable

import torch
from torch import nn

from ecosystem.training import record_parameters, scenario, token_ids
from ecosystem.with_transformers import llama, tied_llama
from support.arms import Run, Scenario

PACKAGES = ("accelerate", "transformers", "trl")
IMPORTS = (
    "accelerate",
    "accelerate.utils.fsdp_utils",
    "datasets",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl",
    "trl.trainer.sft_trainer",
)


def switch_on(accelerator, **options) -> None:
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **{"reshard_after_forward": True, "cpu_ram_efficient_loading": False, **options},
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.device_mesh = None


def accelerated(micro: int = 1, **options) -> Callable[[Run], None]:
    def steps(run: Run) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
        if run.fsdp:
            switch_on(accelerator, **options)
        optimizer = torch.optim.AdamW(run.module.parameters(), lr=0.01)
        run.module, run.optimizer = accelerator.prepare(run.module, optimizer)
        with run.count("step"):
            for step in range(3 * micro):
                with accelerator.accumulate(run.module):
                    ids = token_ids(run, step)
                    loss = run.module(input_ids=ids, labels=ids).loss
                    run.record(f"{step}/loss", loss)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(run.module.parameters(), 1.0)
                        run.record(f"{step}/norm", float(norm))
                    run.record_gradients(str(step))
                    run.optimizer.step()
                    run.optimizer.zero_grad()
        record_parameters(run, "end")
        state = accelerator.get_state_dict(run.module)
        run.record_all("state", state)

    return steps


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from ecosystem.training import VOCAB

    words = {str(i): i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="1")),
        pad_token="0",
        eos_token="2",
        unk_token="1",
    )


def fine_tuned(lora: bool = False, **settings) -> Callable[[Run], None]:
    def steps(run: Run) -> None:
        import datasets
        from trl import SFTConfig, SFTTrainer

        rows = [token_ids(run, i, 1, 8)[0].tolist() for i in range(8)]
        arguments = SFTConfig(
            output_dir=str(run.directory),
            use_cpu=True,
            bf16=False,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        )
        adapters = {}
        if lora:
            from peft import LoraConfig

            adapters["peft_config"] = LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
            )
        trainer = SFTTrainer(
            model=run.module,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(),
            **adapters,
        )
        if run.fsdp:
            switch_on(trainer.accelerator)
            trainer.is_fsdp_enabled = True
        with run.count("step"):
            trainer.train()
        assert [m for m in trainer.model.modules() if type(m).__name__.startswith("FSDP")] or (
            not run.fsdp
        )
        timing = ("runtime", "per_second")
        for index, entry in enumerate(trainer.state.log_history):
            seen = {k: v for k, v in entry.items() if not k.endswith(timing)}
            run.record(f"log {index}", seen)
        run.module = trainer.model
        record_parameters(run, "end")

    return steps


def _scenario(library: str, name: str, steps, model=llama, **kwargs) -> Scenario:
    return scenario(library, name, model=model, steps=steps, **kwargs)


SCENARIOS = [
    _scenario("accelerate", "FSDP 2", accelerated()),
    _scenario("accelerate", "FSDP 2, accumulation", accelerated(micro=2)),
    _scenario("accelerate", "FSDP 2, tied embeddings", accelerated(), tied_llama),
    _scenario("accelerate", "FSDP 2, kept after forward",
              accelerated(reshard_after_forward=False)),
    _scenario("accelerate", "FSDP 2, loaded through meta",
              accelerated(cpu_ram_efficient_loading=True)),
    _scenario("trl", "SFTTrainer", fine_tuned()),
    _scenario("trl", "SFTTrainer, accumulation, checkpointing",
              fine_tuned(gradient_accumulation_steps=2, gradient_checkpointing=True)),
    # trl's loss gathers the output weight by itself (a DTensor's full_tensor), so gathers remain.
    _scenario("trl", "SFTTrainer, LoRA", fine_tuned(lora=True), size_one=None),
]  # fmt: skip
