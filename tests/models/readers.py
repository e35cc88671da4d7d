"""Which module reads each key of a recipe whose effect takes a service, an engine or hours to see, if not its own.

What the key does is tested where it is read; `tests.models.test_settings` holds that it is read there at all.
"""

# A module, and the keys that it reads of each table.
_KEYS = """
flows/build.py: recipe.Recipe = seed target text select train traffic
flows/clean.py: recipe.Recipe = keep
flows/demo.py: recipe.Recipe = demo
flows/deployments.py: recipe.Recipe = schedule; recipe.Schedule = build_cron retain_days
flows/refresh.py: recipe.Gate = promote
flows/post_promotion.py: recipe.PostPromotionParams = period_s
infra/clean.py: recipe.Keep = num_drafts days gib log_mib
models/core/drafting/eagle3_heads.py: drafts.dflash = vocab_size aux_layers; drafts.eagle3 = aux_layers; drafts.hydra =
    vocab_size; drafts.parallel_eagle = vocab_size aux_layers
models/core/drafting/heads.py: drafts.hydra = num_heads num_layers; drafts.medusa = num_layers
models/engines/vllm/engine.py: engines.vllm = dtype
models/engines/vllm/grammars.py: serving.Structured = enabled max_bytes max_depth max_regex timeout_s max_memory_mib
models/engines/vllm/launch.py: engines.vllm = num_draft_tokens max_model_len max_num_seqs extra draft_sample_method
    plan_steps lookup lengths batch_invariant; engines.EngineParams = num_draft_tokens max_model_len
models/engines/vllm/measuring.py: engines.LookUp = num_tokens; engines.vllm = enforce_eager
models/engines/vllm/worker.py: engines.LookUp = shortest longest remembered
models/core/evaluation/gate.py: recipe.Gate = floor confidence num_resamples floor_conversations alpha_total
models/core/learning/loop.py: learning.distill = weight_decay max_grad_norm checkpoint_s; stages.Select = weight_decay
    max_grad_norm checkpoint_s; stages.Shrink = weight_decay max_grad_norm checkpoint_s; stages.Pretrain = weight_decay
    max_grad_norm checkpoint_s; stages.Quantize = weight_decay max_grad_norm checkpoint_s; stages.Finetune =
    weight_decay max_grad_norm checkpoint_s
models/core/learning/training.py: stages.Select = learning_rate warmup num_epochs batch_tokens; stages.Shrink =
    learning_rate warmup num_epochs batch_tokens max_length; stages.Pretrain = learning_rate warmup num_epochs
    batch_tokens max_length; stages.Quantize = learning_rate warmup num_epochs batch_tokens max_length;
    stages.Finetune = learning_rate warmup num_epochs batch_tokens max_length
models/core/learning/rollouts.py: answers.mixed_requests = rounds temperature; answers.mixed_tokens = rounds
    temperature; answers.on_policy = rounds temperature
models/lengths/goodput.py: lengths.goodput = margin explore rest_after end_early
models/lengths/specdec_pp.py: lengths.specdec_pp = head threshold num_layers rejection_weight
models/regimes/checkpointing.py: regimes.checkpointing = every
models/regimes/paged_state.py: regimes.paged_state = folder
models/shrink/__init__.py: shrink.depth = num_documents
models/shrink/low_rank.py: shrink.low_rank = keep
models/sources/chitchat.py: sources.chitchat = num_user_turns min_chars max_chars min_turns max_document_chars
models/sources/dataset.py: sources.dataset = path subset split column domain only group_column count
models/sources/reasoned.py: sources.reasoned = path task column reference_column separator instruction domain
models/sources/stdlib_code.py: sources.stdlib_code = min_chars max_chars max_document_chars
tasks/stages/workers.py: stages.Train = workers cpus gpus sharded
models/targets/scratch.py: targets.scratch = tokenizer
models/targets/pretrained.py: targets.pretrained = path revision dtype chat_template
models/verify/judge.py: verify.judge = head threshold marks bad_weight
models/verify/relaxed_nearest.py: verify.relaxed_nearest = neighbours delta
services/http_server.py: serving.Limits = max_body_bytes max_held_bytes body_timeout_s
services/capture.py: serving.Capture = share max_disk_mib max_memory_mib keep_days
services/reverse_proxy.py: serving.Serve = front port
infra/rollouts.py: types.RolloutParams = waves pause_s test_s
services/reasoning.py: serving.Reasoning = model engine methods
services/reconciler.py: serving.Serve = poll_s min_free_memory_gib probation canary; serving.Probation = timeout_s
    put_back_s; evaluation.golden.CanaryParams = timeout_s
services/probation.py: serving.Probation = num_prompts tolerance
services/swap.py: serving.Serve = min_swap_interval_s; evaluation.golden.CanaryParams = period_s max_in_flight
services/config.py: serving.Serve = num_gpus
services/replica.py: serving.Serve = num_replicas autoscaling; serving.Autoscaling = min_replicas max_replicas
    target_ongoing_requests upscale_delay_s downscale_delay_s
services/service.py: serving.Serve = rollout drain_s merge_streams tool_parser limits structured seeded drift_detector
    capture reasoning; evaluation.drift_detector = period_s
services/fair_queue.py: serving.Limits = max_share_per_key max_queued_requests max_queued_tokens_per_key
tasks/regenerate.py: recipe.Refresh = regenerate; recipe.Regeneration = max_tokens temperature per_domain max_minutes
tasks/claim_window.py: recipe.Recipe = refresh; recipe.Refresh = min_rows max_rows held_out_fraction replay_per_domain
    max_share_per_key
tasks/check_recipe.py: recipe.Recipe = engine serve
tasks/distill_draft.py: learning.distill = max_length; recipe.Recipe = draft distill; learning.teacher.TeacherParams =
    model
tasks/find_challenger.py: recipe.Refresh = pool
tasks/change_model.py: recipe.Recipe = pretrain shrink prune finetune quantize; stages.Finetune = method domain regimes
    second; stages.Second = domain weight; stages.Pretrain = regimes; stages.Prune = method pattern num_documents
    max_length; stages.Quantize = method num_documents exceptions; stages.Shrink = method
tasks/gate_draft.py: recipe.Recipe = gate
tasks/generate_answers.py: recipe.Recipe = generate; recipe.Generate = max_tokens concurrency num_golden
tasks/measure/demonstration.py: recipe.Demo = first_domain new_domain num_requests concurrency held_out_per_domain
    stock
tasks/prepare_text.py: stages.Text = source
tasks/select_data.py: recipe.Traffic = source send_groups
tasks/select_text.py: stages.Select = max_length method num_documents num_rounds proxy
tasks/stages/throttle.py: learning.distill = device
tasks/stages/split.py: recipe.Refresh = share_wait_s
tasks/trigger/ask.py: recipe.Schedule = refresh_interval_s
tasks/trigger/acknowledge.py: recipe.Schedule = retry_s max_retry_s min_free_memory_gib
tasks/post_promotion_test.py: recipe.Recipe = post_promotion_test; recipe.PostPromotionParams = alpha num_requests
    per_look max_wait_s
"""

READERS: dict[str, str] = {}  # key to module
for _module, _, _tables in (line.partition(": ") for line in _KEYS.replace("\n    ", " ").strip().splitlines()):
    for _table, _, _keys in (one.partition(" = ") for one in _tables.split("; ")):
        READERS |= {f"{_table}.{key}": _module for key in _keys.split()}
