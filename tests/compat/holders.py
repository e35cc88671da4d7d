"""What reading redraft's sources can't tell: which objects of vLLM's stand behind which names."""

# Dotted strings that name no symbol: a logger, and groups of plugins, with the module that looks them up.
STRINGS: dict[str, str] = {
    "vllm.redraft": "",
    "vllm.general_plugins": "vllm.plugins",
    "vllm.endpoint_plugins": "vllm.plugins",
}
# Uses that reading can't see.
DECLARED = {
    "redraft_vllm/swap.py": (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.drafter",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.speculator",
        "vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.model",
    ),
}
# What variables, attributes and results of functions hold, in all files and in some; behind a ":", what a module sets
# on objects that have no class of their own in vLLM.
HOLDERS = {
    "DraftExtension": "vllm.v1.worker.gpu_worker.Worker",
    "DraftRoutes": "vllm.plugins.endpoint_plugins.interface.EndpointPlugin",
    "block": "vllm.v1.core.kv_cache_utils.KVCacheBlock",
    "block_pool": "vllm.v1.core.block_pool.BlockPool",
    "common_attn_metadata": "vllm.v1.attention.backend.CommonAttentionMetadata",
    "coordinator": "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
    "draft_model_config": "vllm.config.ModelConfig",
    "draft_token_ids": "vllm.v1.outputs.DraftTokenIds",
    "drafter": "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer",
    "engine": "vllm.engine.protocol.EngineClient",
    "engine_client": "vllm.engine.protocol.EngineClient",
    "get_current_vllm_config": "vllm.config.VllmConfig",
    "input_batch": "vllm.v1.worker.gpu_input_batch.InputBatch",
    "kv_cache_manager": "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "llm": "InstrumentedLLM",
    "manager": "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager",
    "model_config": "vllm.config.ModelConfig",
    "model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "observability_config": "vllm.config.ObservabilityConfig",
    "parallel_config": "vllm.config.ParallelConfig",
    "pool": "vllm.v1.core.block_pool.BlockPool",
    "runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "sampling_metadata": "vllm.v1.sample.metadata.SamplingMetadata",
    "sampling_params": "vllm.sampling_params.SamplingParams",
    "scheduler_config": "vllm.config.SchedulerConfig",
    "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
    "speculative_config": "vllm.config.SpeculativeConfig",
    "structured_outputs": "vllm.sampling_params.StructuredOutputsParams",
    "vllm_config": "vllm.config.VllmConfig",
    "worker": "vllm.v1.worker.gpu_worker.Worker",
}
IN_FILE = {
    "engine.py": {"engine": ""},
    "measuring.py": {"engine": ""},
    "launch.py": {"vllm_config": ""},
    "openai.py": {
        "engine": "",
        "state": "vllm.entrypoints.launchers.api_server.app_state:",
        "_state": "vllm.entrypoints.generate.api_router:",
        "engine_client": "InstrumentedLLM",
        "openai_serving_chat": "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat",
        "openai_serving_completion": "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion",
        "openai_serving_models": "vllm.entrypoints.openai.models.serving.OpenAIServingModels",
        "request": "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
    },
    "patches/attention.py": {
        "impl": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
        "layer": "vllm.model_executor.layers.attention.Attention",
        "metadata": "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata",
    },
    "patches/__init__.py": {"worker": ""},
    "patches/compiled.py": {"config": "vllm.config.ModelConfig", "_config": ""},
    "patches/dflash.py": {
        "attention": "vllm.model_executor.models.qwen3_dflash.DFlashQwen3Attention",
        "model": "vllm.model_executor.models.qwen3_dflash.DFlashQwen3Model",
    },
    "patches/last_tap.py": {"model": "vllm.model_executor.models.interfaces:"},
    "patches/linear_kernels.py": {
        "kernel": "vllm.model_executor.kernels.linear.mixed_precision.cpu.CPUWNA16LinearKernel",
        "layer": "vllm.model_executor.layers.utils:",
    },
    "patches/outputs.py": {"output": "vllm.v1.engine.EngineCoreOutput"},
    "patches/proposer.py": {
        "model": "vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM",
        "request": "vllm.v1.worker.gpu_input_batch.CachedRequestState",
        "kwargs[]": "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose",
        "step[]": "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose",
    },
    "patches/small_batch_gemm.py": {
        "layer": "vllm.model_executor.layers.linear:",
        "product": "vllm._custom_ops.CPUDNNLGEMMHandler",
    },
    "precompile.py": {"engine": ""},
    "redraft_vllm/routes.py": {"config": "vllm.config.VllmConfig"},
    "redraft_vllm/swap.py": {
        "inner": "vllm.model_executor.models.qwen3_dflash.DFlashQwen3Model",
        "model": "vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM",
    },
    "scheduler.py": {
        "of_client": "vllm.v1.engine.EngineCoreOutputs",
        "output": "vllm.v1.engine.EngineCoreOutput",
        "request": "vllm.v1.request.Request",
        "schedule": "vllm.v1.core.sched.output.SchedulerOutput",
    },
    "tap.py": {
        "answer": "vllm.outputs.CompletionOutput",
        "entry": "vllm.logprobs.Logprob",
        "stats": "vllm.v1.metrics.stats.RequestStateStats",
    },
}
