"""Keys that users of other trainers write, and what does the same here.

`FLAT` has names of TRL's `GRPOConfig` and of other flat configurations, `NESTED` those of verl and prime-rl with their
sections, where a `*` stands for anything and the first pattern that fits counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

_LEAVE_OUT = "leave it out: "
_REWARD_MODEL = (
    "use `reward_funcs: [...]` with the directory or hub name of a sequence-classification model, a reward model, or "
    "with functions of your own"
)
_ORDER = (
    "use `selector: ordered` for the order of the data, or `selector: {name: ordered, by: ...}` for that of a column; "
    "without it prompts come in an order drawn from `seed`"
)
_GRPO = (
    "choose `advantage: grpo` (scaled by the group's population std), `advantage: {}` (the sample std, as in {}) or "
    "`advantage: dr_grpo` (not scaled)"
)
_FLAT = {
    # the data
    "use `env: {name: dataset, path: ...}`": "dataset_name data_path train_files train_file dataset_mixture datasets",
    "use `env: {name: dataset, path: ..., system_prompt: ...}`": "system_prompt",
    "use `env: {name: dataset, path: ..., prompt_column: ...}`": "dataset_prompt_column dataset_text_field",
    "use `env: python_tool` or a task of your own, `env: tasks.py:MyTask`; in Python winnow.env.tools.with_tools "
    "makes a task with tools for Trainer(env=...)": "tools environment_factory",
    "use `env` with a task of many turns, see docs/environments.md, or `engine`": "rollout_func",
    "use `env: {name: dataset, path: ...}`, or in Python Trainer(train_dataset=...)": "train_dataset",
    "use `env: {name: dataset, path: ..., test: ...}`, or in Python Trainer(eval_dataset=...)": ""
    "eval_dataset val_files",
    "use `env: {name: dataset, split: ..., test_split: ..., subset: ...}`": "dataset_config dataset_configs "
    "dataset_train_split dataset_test_split dataset_split eval_split test_split_size",
    _LEAVE_OUT + "data are read to their end and kept on disk": "dataset_streaming streaming dataset_num_proc",
    "prompts come in an order drawn from `seed`, without a seed of their own": "data_seed ignore_data_skip "
    "dataloader_drop_last",
    _ORDER: "shuffle_dataset shuffle curriculum train_sampling_strategy length_column_name group_by_length",
    _LEAVE_OUT + "every column goes to the reward functions that name it": "remove_unused_columns label_names",
    _LEAVE_OUT + "prompts are read without loader processes": "dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
    # the shape of a step
    "use `prompts_per_step` (prompts) and `num_generations` (rollouts of each)": "per_device_train_batch_size "
    "generation_batch_size batch_size rollout_batch_size steps_per_generation",
    "use `prompts_per_step`": "train_batch_size prompts_per_batch",
    "use `num_generations`": "group_size_n n_rollouts rollouts_per_example rollout_n n",
    "use `tokens_per_microbatch`; accumulation follows from it": "gradient_accumulation_steps auto_find_batch_size "
    "ppo_micro_batch_size_per_gpu micro_batch_size per_gpu_train_batch_size",
    "use `max_lag`": "max_staleness max_async_level max_off_policy_steps",
    "use `max_steps` or `num_train_epochs`": "total_epochs epochs n_epochs total_training_steps num_steps",
    "use `num_iterations`": "ppo_epochs mu",
    "use `max_completion_length`": "max_new_tokens max_response_length response_length max_tokens",
    "use `max_prompt_length` and `max_completion_length`": "seq_len max_seq_length max_length max_model_len",
    # generation
    "use `engine: vllm` (extra `vllm`), with its options in that section": "use_vllm vllm_mode vllm_model_impl",
    "use `engine: {name: vllm}`; its device and type follow from `device` and `dtype`": "vllm_device vllm_dtype",
    _LEAVE_OUT + "vLLM has its default here": "vllm_enable_prefix_caching",
    "use `engine: {name: vllm, gpu_memory_utilization: ...}`": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "use `engine: {name: vllm, tensor_parallel_size: ...}`": "vllm_tensor_parallel_size tensor_parallel_size",
    "use `max_prompt_length` and `max_completion_length`, from which vLLM's longest sequence follows": ""
    "vllm_max_model_length vllm_max_model_len",
    _LEAVE_OUT + "vLLM runs inside a sampler's process, without a server, and gives its weights up during an update": ""
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_enable_sleep_mode "
    "ds3_gather_for_generation",
    _LEAVE_OUT + "the embedded engine batches continuously by itself; see `engine`": "cache_implementation use_cache "
    "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
    "use `stop`, `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`; there are no others": ""
    "generation_kwargs vllm_structured_outputs_regex vllm_guided_decoding_regex guided_decoding_regex",
    "use `repetition_penalty`": "frequency_penalty presence_penalty",
    "use `chat_template`, the text of a template or a file": "chat_template_path custom_chat_template",
    "use `chat_template_kwargs`": "apply_chat_template_kwargs enable_thinking",
    "tasks bound their turns: `env: {name: python_tool, max_calls: ...}`, or the task's `max_turns`": ""
    "max_tool_calling_iterations max_turns",
    # methods and the loss
    _GRPO.format("{name: grpo, ddof: 1, eps: 0.0001}", "TRL"): "scale_rewards",
    _GRPO.format("{name: grpo, ddof: 1}", "verl"): "norm_adv_by_std_in_grpo",
    "use `advantage: grpo`, `rloo`, `reinforce_pp`, `remax`, ...; `winnow methods` lists them": "adv_estimator "
    "advantage_estimator",
    "use `reward_weights`; rewards are summed by them before the advantage": "multi_objective_aggregation",
    "use `correction: truncate`, `mask` or `m2po`, with their bounds as options": "vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_cap off_policy_mask_threshold tis_imp_ratio_cap",
    "the KL term has the importance weight of the policy term always": "use_bias_correction_kl",
    "use `epsilon` and `epsilon_high`": "clip_range cliprange clip_ratio clip_ratio_low clip_ratio_high delta",
    "use `beta`": "kl_coef kl_loss_coef kl_beta use_kl_loss",
    "use `kl_in_reward` with `beta`": "use_kl_in_reward",
    _REWARD_MODEL: "reward_model reward_model_path reward_model_name_or_path reward_model_config",
    _LEAVE_OUT + "a reward model is read with the tokenizer of its own directory": "reward_processing_classes",
    "use `reward_funcs: [file.py:function]`, where the function has its own constants": "cosine_min_value_wrong "
    "cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct cosine_max_len repetition_n_grams "
    "repetition_max_penalty max_completion_len soft_punish_cache code_language code_provider code_eval_scoring_mode "
    "code_eval_test_batch_size parallel_code_exec_per_proc e2b_router_url morph_router_url ioi_provider",
    "use `kl_estimator`": "kl_loss_type kl_penalty",
    "use `loss_type`": "loss_agg_mode",
    "use `policy_loss: clip` or `plain`; SAPO and VESPO are not here": "sapo_temperature_neg sapo_temperature_pos "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    "use `entropy_coef`, a constant; there is no controller and no mask by entropy": "top_entropy_quantile "
    "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target entropy_coeff",
    "the reference is the initial model, or follows with `sync_ref_model`; measure with `reference_kl_steps`": ""
    "ref_model ref_model_init_kwargs",
    "use `filter: zero_variance`": "filter_groups dynamic_sampling",
    # the model
    "use `model`, a directory or hub name": "model_name_or_path model_name model_path base_model tokenizer_name",
    "load the model yourself and give it to Trainer(model=..., processing_class=...)": "model_init_kwargs "
    "attn_implementation torch_dtype load_in_8bit load_in_4bit model_revision quantization_config bnb_4bit_quant_type "
    "use_bnb_nested_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype",
    "give it to Trainer(processing_class=...), or save it in the directory of `model`": "tokenizer processing_class",
    "there is no such switch: code from a model's repository is never run": "trust_remote_code",
    "use `lora: {r: 16}`": "use_peft lora_r peft_config",
    "use `lora: {alpha: 32}`": "lora_alpha",
    "use `lora: {dropout: 0.05}`": "lora_dropout",
    "use `lora: {target_modules: ...}`": "lora_target_modules",
    "`lora` has r, alpha, dropout, target_modules and merge; for rslora give Trainer a PeftModel and "
    "`lora: {resume: true}`": "lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora",
    _LEAVE_OUT + "models train without dropout, but for `lora: {dropout: ...}`": "disable_dropout",
    _LEAVE_OUT + "an auxiliary loss for routers is not here": "router_aux_loss_coef",
    # the update
    "use `learning_rate`": "lr actor_lr",
    "use `warmup_steps`, as a share of all steps below 1": "warmup_ratio lr_warmup_steps_ratio lr_warmup_steps",
    "use `lr_end` and `lr_decay_steps`": "min_lr min_lr_ratio",
    "use `lr_scheduler_type`": "lr_scheduler warmup_style scheduler",
    "use `adam_beta1` and `adam_beta2`": "betas",
    "use `max_grad_norm`": "grad_clip clip_grad gradient_clipping",
    _LEAVE_OUT + "all trained parameters have the same optimizer": "optim_target_modules",
    "use `optim`, `optim_args` and `learning_rate`; the optimizer is built here": "optimizers",
    "use `dtype: bfloat16`": "bf16 bf16_full_eval mixed_precision",
    "use `dtype: float16`": "fp16 fp16_full_eval",
    "use `matmul_precision: high`": "tf32",
    _LEAVE_OUT + "logits and log-probabilities are float32": "cast_lm_head_to_fp32",
    "use `gradient_checkpointing`": "activation_checkpointing",
    _LEAVE_OUT + "`gradient_checkpointing` recomputes layers as with use_reentrant false, and has no other way": ""
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs gradient_checkpointing_use_reentrant",
    _LEAVE_OUT + "the loss holds no logits of a long vocabulary anyway": "use_liger_kernel liger_kernel_config "
    "torch_empty_cache_steps use_liger use_liger_loss",
    _LEAVE_OUT + "nothing is compiled but the step of 8 and 4 bit optimizers": "torch_compile torch_compile_backend "
    "torch_compile_mode",
    _LEAVE_OUT + "it is no part of this loss": "label_smoothing_factor neftune_noise_alpha",
    _LEAVE_OUT + "rows of a micro-batch are of like length, and the loss counts real tokens alone": ""
    "pad_to_multiple_of average_tokens_across_devices use_remove_padding packing",
    # machines
    "use `device: cpu`": "use_cpu no_cuda",
    "use `learner: {name: fsdp, ranks: ...}` (Ray)": "fsdp fsdp_config deepspeed accelerator_config parallelism_config "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
    "ignore_bias_buffers local_rank n_gpus_per_node nnodes num_processes",
    "use `deterministic: true` on a GPU; on a CPU runs are bit-identical with the same `seed` and `threads`": ""
    "full_determinism",
    # evaluation
    "use `eval_steps`, which evaluates before the first step and at the end, too": "eval_strategy eval_delay "
    "evaluation_strategy eval_on_start test_freq val_before_train do_eval eval_interval",
    "use `eval_prompts` and `eval_generations`": "per_device_eval_batch_size num_generations_eval",
    _LEAVE_OUT + "evaluations sample and judge; there is no loss to gather": "prediction_loss_only "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
    "compute_metrics data_collator preprocess_logits_for_metrics",
    "run `winnow eval`, or in Python give Trainer(callbacks=...)": "benchmarks",
    "give them in Python, Trainer(callbacks=[...])": "callbacks",
    "run `winnow eval`": "do_predict val_only",
    "run `winnow train FILE`": "do_train",
    # what is kept and shown
    "run `winnow resume RUN`": "resume_from_checkpoint resume_mode resume resume_step "
    "restore_callback_states_from_checkpoint",
    "use `save_steps`; the last step is always saved": "save_strategy save_freq save_interval ckpt_interval",
    _LEAVE_OUT + "checkpoints hold all that a resume needs": "save_only_model save_on_each_node enable_jit_checkpoint",
    "the last model is saved; `eval_steps` and `save_total_limit` keep others beside it": "load_best_model_at_end "
    "metric_for_best_model greater_is_better",
    "set HF_TOKEN in the environment, or run `hf auth login`: a configuration is kept with the run": "hub_token",
    _LEAVE_OUT + "uploads wait for each other, none is left out, and all go to the main branch": "hub_always_push "
    "hub_revision hub_model_revision push_to_hub_revision overwrite_hub_revision",
    "use a new `output_dir`, or `winnow resume RUN`: a run never overwrites another": "overwrite_output_dir",
    "use `log_completions`, which keeps them with the run, and `report_to`": "log_completions_hub_repo",
    _LEAVE_OUT + "every step is a line of metrics.jsonl, and the console shows them": "logging_strategy logging_steps "
    "logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level "
    "log_level_replica disable_tqdm debug skip_memory_metrics",
    "use `log_completions`, a number of rollouts": "num_completions_to_print log_unique_prompts log_multimodal "
    "wandb_log_unique_prompts log_val_generations",
    "use `report_to`": "logger use_wandb wandb_mode",
    "the project is called winnow; set WANDB_PROJECT or the tracker's own variable for another": "project "
    "trackio_space_id trackio_bucket_id trackio_static_space_id wandb_project project_name "
    "wandb_entity wandb_run_group",
    "use `run_name`": "wandb_name experiment_name exp_name",
    "use `output_dir`": "default_local_dir save_dir ckpt_path logging_dir",
}
FLAT = {key: answer for answer, keys in _FLAT.items() for key in keys.split()}
"""What to write, by the key that somebody wrote."""

_NESTED = {
    # verl
    "use `env: {name: dataset, preset: verl, path: ...}`": "data.train_files",
    "use `env: {name: dataset, preset: verl, test: ...}`": "data.val_files",
    "use `env: {name: dataset, prompt_column: ...}`": "data.prompt_key",
    "use `max_completion_length`": "data.max_response_length *.rollout.response_length *.sampling.max_tokens "
    "sampling.max_*tokens",
    "use `max_prompt_length`": "data.max_prompt_length *.rollout.prompt_length",
    "use `prompts_per_step`": "data.train_batch_size data.gen_batch_size",
    "use `chat_template`, the text of a template or a file": "*.custom_chat_template *.chat_template",
    "use `chat_template_kwargs`": "data.apply_chat_template_kwargs* *.sampling.extra_body*",
    _ORDER: "data.shuffle data.seed data.sampler*",
    "over-long prompts fail, are counted at the start, and are never cut": "data.filter_overlong* data.truncation",
    "use `env: {name: dataset, ...}`": "data.*",
    "use `model`": "*.model.path model.name *.model.name model.path",
    "use `gradient_checkpointing`": "*.enable_gradient_checkpointing *.model.ac*",
    "use `lora: {r: ..., alpha: ..., target_modules: ...}`": "*.lora* *.target_modules *.model.experimental.lora*",
    "there is no such switch: code from a model's repository is never run": "*.trust_remote_code",
    "use `learning_rate`": "*.optim.lr optim.lr",
    "use `warmup_steps`, as a share of all steps below 1": "*.lr_warmup_steps* *.scheduler.warmup_steps",
    "use `lr_scheduler_type`, `lr_end` and `lr_decay_steps`": "*.optim.lr_scheduler_type *.optim.warmup_style "
    "*.optim.min_lr_ratio *.optim.num_cycles *.scheduler.*",
    "use `max_grad_norm`": "*.grad_clip *.clip_grad *.optim.max_norm",
    "use `weight_decay`": "*.optim.weight_decay optim.weight_decay",
    "use `adam_beta1` and `adam_beta2`": "*.optim.betas* *.optim.beta*",
    "use `optim`": "*.optim.optimizer* *.optim.type optim.type",
    "use `prompts_per_step` and `num_iterations`: a batch is one update": "*.ppo_mini_batch_size *.ppo_epochs",
    "use `tokens_per_microbatch`": "*.ppo_micro_batch_size* *.ppo_max_token_len* *.use_dynamic_bsz *.micro_batch_size "
    "*.log_prob_micro_batch_size* *.log_prob_max_token_len* *.log_prob_use_dynamic_bsz",
    "use `epsilon` and `epsilon_high`": "*.actor.clip_ratio *.actor.clip_ratio_low *.actor.clip_ratio_high",
    "use `entropy_coef`": "*.entropy_coeff",
    "use `beta` (0 for none) and `kl_estimator`": "*.use_kl_loss *.kl_loss_coef *.kl_loss_type",
    "use `kl_in_reward` with `beta`": "algorithm.use_kl_in_reward algorithm.kl_*",
    "use `loss_type`": "*.loss_agg_mode *.loss_scale_factor",
    "use `policy_loss`, `importance_sampling_level` and `correction`": "*.policy_loss.* *.clip_ratio_c trainer.loss.* "
    "algorithm.rollout_correction.* *.rollout_is*",
    "use `num_generations`": "*.rollout.n orchestrator.rollouts_per_example rollouts_per_example",
    "use `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`": "*.rollout.temperature *.rollout.top_p "
    "*.rollout.top_k *.sampling.temperature *.sampling.top_* *.sampling.min_p *.sampling.repetition_penalty",
    "use `eval_temperature`, `eval_top_p`, `eval_top_k`, `eval_generations` and `eval_greedy`": "*.val_kwargs.* "
    "*.eval.sampling.* *.eval.rollouts_per_example",
    "use `engine: local` or `engine: vllm`": "*.rollout.name *.rollout.mode",
    "use `engine: {name: vllm, gpu_memory_utilization: ..., tensor_parallel_size: ...}`": "*.gpu_memory_utilization "
    "*.tensor_model_parallel_size inference.parallel* inference.vllm* inference.gpu_memory_utilization",
    "use `sync: processes` or `ray` for samplers beside the learner, and `engine` for what they run": "inference.* "
    "*.rollout.engine_kwargs* *.rollout.agent.* *.max_num_seqs *.max_num_batched_tokens *.enforce_eager "
    "*.free_cache_engine *.enable_chunked_prefill *.enable_prefix_caching *.load_format *.max_model_len",
    "a task has its turns and tools: see docs/environments.md": "*.multi_turn.*",
    "use `learner: {name: fsdp, ranks: ...}` (Ray)": "*.fsdp_config.* *.strategy *.ulysses_* *.megatron.* "
    "trainer.n_gpus_per_node trainer.nnodes trainer.model.fsdp* trainer.model.dp_* trainer.dist* ray_kwargs.* "
    "ray_init.*",
    "the reference is the initial model; see `beta`": "*.ref.*",
    "there is no critic: advantages are relative to the group": "critic.* algorithm.gamma algorithm.lam "
    "trainer.critic_warmup",
    "use `reward_funcs: [file.py:function]`; verl's compute_score works as it is": "custom_reward_function.* "
    "reward.custom_reward_function.*",
    _REWARD_MODEL: "reward_model.* reward.*",
    "use `advantage: grpo`, `rloo`, `reinforce_pp`, `remax`, ...; `winnow methods` lists them": ""
    "algorithm.adv_estimator orchestrator.advantage* algorithm.advantage*",
    _GRPO.format("{name: grpo, ddof: 1}", "verl"): "algorithm.norm_adv_by_std_in_grpo",
    "use `filter: zero_variance`, with `rollout_batch` for its rounds": "algorithm.filter_groups.* "
    "orchestrator.filters* "
    "orchestrator.buffer.online_difficulty_filtering orchestrator.oversampling_factor",
    "use `max_steps` or `num_train_epochs`": "trainer.total_epochs trainer.total_training_steps trainer.max_steps "
    "orchestrator.max_steps *.optim.total_training_steps",
    "use `eval_steps`": "trainer.test_freq trainer.val_before_train trainer.val_only orchestrator.eval.interval "
    "eval.interval *.eval.eval_base_model",
    "use `env: {..., test: ...}` for held-out prompts, and `eval_prompts`": "orchestrator.eval.* eval.*",
    "use `save_steps` and `save_total_limit`": "trainer.save_freq trainer.max_*_ckpt_to_keep *.ckpt.* ckpt.* "
    "*.checkpoint.*",
    "use `output_dir`": "trainer.default_local_dir trainer.default_hdfs_dir trainer.output_dir orchestrator.output_dir",
    "run `winnow resume RUN`": "trainer.resume_*",
    "use `report_to` and `run_name`": "trainer.logger* trainer.project_name trainer.experiment_name *.wandb.* wandb.*",
    "use `log_completions`": "trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir",
    # prime-rl
    "use `prompts_per_step` times `num_generations`": "orchestrator.batch_size orchestrator.token_batch_size",
    "use `max_lag`": "*.max_async_level *.max_off_policy_steps *.strict_async_level",
    "use `max_prompt_length` and `max_completion_length`": "*.seq_len",
    "use `selector: greso` or `selector: {name: pass_rate, ...}`": "orchestrator.buffer.*",
    "use `env: {name: ..., options}`": "orchestrator.env* environment.* env.id",
    "samplers are bounded by `engine: {slots: ...}`": "*.max_concurrent *.max_inflight_rollouts *.tasks_per_minute",
    "use `sync: processes` or `ray`; weights travel by themselves": "*.weight_broadcast.* *.rollout_transport.*",
}
NESTED = [(pattern, answer) for answer, patterns in _NESTED.items() for pattern in patterns.split()]


def answers(key: str, value: Any) -> Iterator[tuple[str, str | None]]:
    """Each key that was written under an unknown one, dotted, and what to write instead, if it is known elsewhere."""
    if isinstance(value, dict) and value and key not in FLAT:
        for name, inner in value.items():
            yield from answers(f"{key}.{name}", inner)
    else:
        found = FLAT.get(key) or next((answer for pattern, answer in NESTED if fnmatchcase(key, pattern)), None)
        yield key, found


_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_REWARD_FACTORIES = ("get_soft_overlong_punishment", "get_cosine_scaled_reward", "get_repetition_penalty_reward")
"""Names in `trl.rewards`, which TRL's scripts take without a module."""


def reward_elsewhere(target: str, own: Iterable[str]) -> str:
    """` Did you mean 'trl.rewards:think_format_reward'?` for a reward as TRL's scripts name it, or empty text.

    `own`: plain names that are known here.
    """
    module, _, name = target.rpartition(".")
    if name in _REWARD_FACTORIES:
        return (
            f" trl.rewards:{name} makes a reward function: call it in a file of your own, `made = {name}(...)`, and "
            "name that, 'my_rewards.py:made'."
        )
    if name == "py":
        return f" Name a function of the file: '{target}:function'."
    if module:
        return f" Did you mean '{module}:{name}'?"
    close = get_close_matches(target, (*own, *_REWARDS), n=1, cutoff=0.6)
    if not close:
        return ""
    return f" Did you mean '{f'trl.rewards:{close[0]}' if close[0] in _REWARDS else close[0]}'?"
