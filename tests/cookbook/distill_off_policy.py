"""Runs tinker_cookbook.distillation.train_off_policy, which has no command of its own.

python distill_off_policy.py model_name=... teacher_checkpoint=tinker://... n_teacher_targets=8 log_path=...
"""

import asyncio

import chz
from tinker_cookbook import model_info
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def main(
    model_name: str,
    teacher_checkpoint: str,
    log_path: str,
    batch_size: int,
    n_teacher_targets: int,
    learning_rate: float,
    max_steps: int,
) -> None:
    renderer_name = model_info.get_recommended_renderer_name(model_name)
    conversations = NoRobotsBuilder(
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model_name,
            renderer_name=renderer_name,
            max_length=512,
            batch_size=batch_size,
        )
    )
    teacher = TeacherConfig(base_model=model_name, load_checkpoint_path=teacher_checkpoint)
    config = train_off_policy.Config(
        recipe_name="distill_off_policy",
        model_name=model_name,
        renderer_name=renderer_name,
        dataset_configs=[
            train_off_policy.DatasetWithTeacher(dataset_builder=conversations, teacher_config=teacher)
        ],
        log_path=log_path,
        batch_size=batch_size,
        n_teacher_targets=n_teacher_targets,
        learning_rate=learning_rate,
        max_steps=max_steps,
        save_every=0,
        eval_every=0,
    )
    asyncio.run(train_off_policy.main(config))


if __name__ == "__main__":
    chz.entrypoint(main, allow_hyphens=True)
