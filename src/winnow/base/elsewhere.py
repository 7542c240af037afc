"""Names that users of other trainers try, and what does the same here."""

ELSEWHERE = {
    "scale_rewards": "choose `advantage: grpo` (scaled by the group's std) or `advantage: dr_grpo` (not scaled)",
    "per_device_train_batch_size": "use `prompts_per_step` (prompts) and `num_generations` (rollouts of each)",
    "gradient_accumulation_steps": "use `tokens_per_microbatch`; accumulation follows from it",
    "train_batch_size": "use `prompts_per_step`",
    "dataset_name": "use `env: {name: dataset, path: ...}`",
    "train_dataset": "use `env: {name: dataset, path: ...}`, or in Python Trainer(train_dataset=...)",
    "max_staleness": "use `max_lag`",
    "use_peft": "use `lora: {r: 16}`",
    "lora_r": "use `lora: {r: 16}`",
    "resume_from_checkpoint": "run `winnow resume RUN`",
    "per_device_eval_batch_size": "use `eval_prompts` and `eval_generations`",
}
