"""Which module reads each key of a recipe whose effect takes a service, an engine or hours to see.

What the key does is tested where it is read; `tests.models.test_settings` holds that it is read there at all.
"""

_KEYS: dict[str, dict[str, str]] = {
    "flows/build.py": {"recipe.Recipe": "seed target text select train traffic"},
    "flows/clean.py": {"recipe.Recipe": "keep"},
    "flows/demo.py": {"recipe.Recipe": "demo"},
    "flows/deployments.py": {
        "recipe.Recipe": "schedule",
        "recipe.Schedule": "build_cron retain_days",
    },
    "flows/refresh.py": {"recipe.Gate": "promote"},
    "flows/post_promotion.py": {"evaluation.post_promotion_test": "period_s"},
    "infra/clean.py": {"recipe.Keep": "num_drafts days gib log_mib"},
    "models/core/checkpoints/sparsity.py": {"checkpoints.sparsity.Pattern": "sparsity kept group"},
    "models/core/drafting/eagle3_heads.py": {
        "drafts.dflash": "vocab_size aux_layers",
        "drafts.eagle3": "aux_layers",
        "drafts.hydra": "vocab_size",
        "drafts.parallel_eagle": "vocab_size aux_layers",
    },
    "models/core/drafting/heads.py": {"drafts.hydra": "num_heads num_layers", "drafts.medusa": "num_layers"},
    "models/drafts/chimera.py": {"drafts.chimera": "vocab_size num_heads"},
    "models/drafts/clover.py": {"drafts.clover": "vocab_size num_heads"},
    "models/drafts/dflash.py": {"drafts.dflash": "mask_token_id num_layers block_size"},
    "models/drafts/dream/__init__.py": {
        "drafts.dream": "vocab_size noise middle_layers middle_weight image_tokens image_share"
    },
    "models/drafts/eagle.py": {"drafts.eagle": "vocab_size noise feature_sampling partial_alignment"},
    "models/drafts/eagle3/__init__.py": {"drafts.eagle3": "vocab_size"},
    "models/drafts/early_exit.py": {"drafts.early_exit": "exit_layer"},
    "models/drafts/falcon.py": {"drafts.falcon": "vocab_size tokens_per_pass noise"},
    "models/drafts/kangaroo.py": {"drafts.kangaroo": "exit_layer"},
    "models/drafts/lm.py": {"drafts.lm": "num_layers nested"},
    "models/drafts/medusa.py": {"drafts.medusa": "num_heads vocab_size"},
    "models/drafts/ngram.py": {"drafts.ngram": "min_tokens max_tokens"},
    "models/drafts/parallel_eagle.py": {"drafts.parallel_eagle": "mask_token_id retention least_retention"},
    "models/drafts/prompt_tokens.py": {"drafts.prompt_tokens": "num_prompts ensemble num_vectors share"},
    "models/drafts/rag_draft.py": {"drafts.rag_draft": "context part question"},
    "models/drafts/rest.py": {"drafts.rest": "shortest longest capacity"},
    "models/drafts/self_skip.py": {
        "drafts.self_skip": (
            "skip_attention skip_mlp num_trials on_the_fly skip_share window bayes_every enough patience"
        )
    },
    "models/drafts/suffix.py": {"drafts.suffix": "shortest longest factor remembered"},
    "models/drafts/token_recycling.py": {"drafts.token_recycling": "num_candidates tree"},
    "models/engines/torch/__init__.py": {
        "engines.torch": (
            "num_draft_tokens max_model_len dtype device verify verify_greedy lengths trees lookup nested_confidence"
        )
    },
    "models/engines/vllm/__init__.py": {"engines.vllm": "kv_cache_gib"},
    "models/engines/vllm/engine.py": {"engines.vllm": "dtype"},
    "models/engines/vllm/grammars.py": {
        "serving.Structured": "enabled max_bytes max_depth max_regex timeout_s max_memory_mib"
    },
    "models/engines/vllm/launch.py": {
        "engines.vllm": (
            "num_draft_tokens max_model_len max_num_seqs extra draft_sample_method plan_steps lookup lengths"
        ),
        "engines.EngineParams": "num_draft_tokens max_model_len",
    },
    "models/engines/vllm/measuring.py": {"engines.LookUp": "num_tokens", "engines.vllm": "enforce_eager"},
    "models/engines/vllm/worker.py": {"engines.LookUp": "shortest longest remembered"},
    "models/core/evaluation/canary.py": {"evaluation.canary": "fall num_requests"},
    "models/core/evaluation/gate.py": {"recipe.Gate": "floor confidence num_resamples floor_conversations alpha_total"},
    "models/core/evaluation/drift_detector.py": {
        "evaluation.drift_detector": "fall recover between_alarms min_requests"
    },
    "models/core/learning/distill.py": {
        "learning.distill": (
            "lengths verify validation patience learning_rate warmup schedule average num_epochs "
            "min_steps step_decay follow batch_tokens max_minutes num_threads loss answers "
            "teachers"
        )
    },
    "models/core/learning/loop.py": {
        "learning.distill": "weight_decay max_grad_norm checkpoint_s",
        "stages.Select": "weight_decay max_grad_norm checkpoint_s",
        "stages.Shrink": "weight_decay max_grad_norm checkpoint_s",
        "stages.Pretrain": "weight_decay max_grad_norm checkpoint_s",
        "stages.Quantize": "weight_decay max_grad_norm checkpoint_s",
        "stages.Finetune": "weight_decay max_grad_norm checkpoint_s",
    },
    "models/core/learning/teacher.py": {"learning.teacher.TeacherParams": "weight"},
    "models/core/learning/training.py": {
        "stages.Select": "learning_rate warmup num_epochs batch_tokens",
        "stages.Shrink": ("learning_rate warmup num_epochs batch_tokens max_length"),
        "stages.Pretrain": ("learning_rate warmup num_epochs batch_tokens max_length"),
        "stages.Quantize": ("learning_rate warmup num_epochs batch_tokens max_length"),
        "stages.Finetune": ("learning_rate warmup num_epochs batch_tokens max_length"),
    },
    "models/core/learning/rollouts.py": {
        "answers.mixed_requests": "rounds temperature",
        "answers.mixed_tokens": "rounds temperature",
        "answers.on_policy": "rounds temperature",
    },
    "models/lengths/goodput.py": {"lengths.goodput": "margin explore rest_after"},
    "models/lengths/specdec_pp.py": {"lengths.specdec_pp": "head threshold num_layers rejection_weight"},
    "models/reasoning/spec_reason.py": {"reasoning.spec_reason": "threshold num_first max_step_tokens"},
    "models/reasoning/speculative_thinking.py": {
        "reasoning.speculative_thinking": (
            "affirms reflects verifies takeover_tokens keeps_target check_tokens recap_text recap_after "
            "recap_after_more recap_after_most recap_tokens recap_tokens_more recap_tokens_most "
            "max_step_tokens"
        )
    },
    "models/recipe.py": {"recipe.Refresh": "distill", "recipe.Traffic": "num_train num_held_out num_requests"},
    "models/regimes/checkpointing.py": {"regimes.checkpointing": "every"},
    "models/regimes/paged_state.py": {"regimes.paged_state": "folder"},
    "models/shrink/__init__.py": {"shrink.depth": "num_documents"},
    "models/shrink/low_rank.py": {"shrink.low_rank": "keep"},
    "models/sources/chitchat.py": {
        "sources.chitchat": "num_user_turns min_chars max_chars min_turns max_document_chars"
    },
    "models/sources/dataset.py": {"sources.dataset": "path subset split column domain group_column count"},
    "models/sources/reasoned.py": {
        "sources.reasoned": "path task column reference_column separator instruction domain"
    },
    "models/sources/stdlib_code.py": {"sources.stdlib_code": "min_chars max_chars max_document_chars"},
    "models/stages.py": {"stages.Text": "num_train num_held_out"},
    "tasks/stages/workers.py": {"stages.Train": "workers cpus gpus sharded"},
    "models/targets/scratch.py": {"targets.scratch": "tokenizer"},
    "models/targets/pretrained.py": {"targets.pretrained": "path revision dtype chat_template"},
    "models/verify/judge.py": {"verify.judge": "head threshold marks bad_weight"},
    "models/verify/relaxed_nearest.py": {"verify.relaxed_nearest": "neighbours delta"},
    "services/bodies.py": {"serving.Limits": "max_body_bytes max_held_bytes body_timeout_s"},
    "services/capture.py": {"serving.Capture": "share max_disk_mib max_memory_mib keep_days"},
    "services/reverse_proxy.py": {"serving.Serve": "front port"},
    "services/reasoning.py": {"serving.Reasoning": "model engine methods"},
    "services/reconciler.py": {
        "serving.Serve": "poll_s min_free_memory_gib probation canary",
        "serving.Probation": "num_prompts tolerance timeout_s put_back_s",
        "evaluation.canary": "timeout_s",
    },
    "services/swap.py": {"serving.Serve": "min_swap_interval_s", "evaluation.canary": "period_s max_in_flight"},
    "services/service.py": {
        "serving.Serve": "drain_s merge_streams tool_parser limits structured seeded drift_detector capture reasoning",
        "evaluation.drift_detector": "period_s",
    },
    "services/fair_queue.py": {"serving.Limits": "max_share_per_key max_queued_requests max_queued_tokens_per_key"},
    "tasks/regenerate.py": {
        "recipe.Refresh": "regenerate",
        "recipe.Regeneration": "max_tokens temperature per_domain max_minutes",
    },
    "tasks/claim_window.py": {
        "recipe.Recipe": "refresh",
        "recipe.Refresh": "min_rows max_rows held_out_fraction replay_per_domain max_share_per_key",
    },
    "tasks/check_recipe.py": {"recipe.Recipe": "engine serve"},
    "tasks/distill_draft.py": {
        "learning.distill": "max_length",
        "recipe.Recipe": "draft distill",
        "learning.teacher.TeacherParams": "model",
    },
    "tasks/find_past.py": {"recipe.Refresh": "pool"},
    "tasks/change_model.py": {
        "recipe.Recipe": "pretrain shrink prune finetune quantize",
        "stages.Finetune": "method domain regimes second",
        "stages.Second": "domain weight",
        "stages.Pretrain": "regimes",
        "stages.Prune": "method pattern num_documents max_length",
        "stages.Quantize": "method num_documents exceptions",
        "stages.Shrink": "method",
    },
    "tasks/gate_draft.py": {"recipe.Recipe": "gate"},
    "tasks/generate_answers.py": {"recipe.Recipe": "generate", "recipe.Generate": "max_tokens concurrency num_golden"},
    "tasks/measure/demonstration.py": {
        "recipe.Demo": "first_domain new_domain num_requests concurrency held_out_per_domain stock"
    },
    "tasks/prepare_text.py": {"stages.Text": "source"},
    "tasks/select_data.py": {"recipe.Traffic": "source send_groups"},
    "tasks/select_text.py": {"stages.Select": "max_length method num_documents num_rounds proxy"},
    "tasks/stages/throttle.py": {"learning.distill": "device"},
    "tasks/stages/split.py": {"recipe.Refresh": "share_wait_s"},
    "tasks/trigger/ask.py": {"recipe.Schedule": "refresh_interval_s"},
    "tasks/trigger/acknowledge.py": {"recipe.Schedule": "retry_s max_retry_s min_free_memory_gib"},
    "tasks/post_promotion_test.py": {
        "recipe.Recipe": "post_promotion_test",
        "evaluation.post_promotion_test": "alpha num_requests per_look max_wait_s",
    },
}

READERS = {
    f"{table}.{key}": module
    for module, tables in _KEYS.items()
    for table, keys in tables.items()
    for key in keys.split()
}
