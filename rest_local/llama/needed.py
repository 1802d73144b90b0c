"""List by name what this package uses of llama-cpp-python, and find what a version lacks.

Contract: loads nothing. `tests/llama/test_needed.py` compares the tables with the code of this room.

A missing function shows itself when it is called, perhaps after an hour. A missing field of a structure never does,
because ctypes accepts any attribute of an instance. So `loaded` compares all of them before anything is used.
Symbols that only some features need are not here: `features.missing` names them.
"""

from __future__ import annotations

from types import ModuleType

TESTED = ("0.3.36",)  # versions of llama-cpp-python that docs/COMPATIBILITY.md lists as passed, oldest first


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


BINDINGS = _words("""
    GGML_NUMA_STRATEGY_DISTRIBUTE GGML_NUMA_STRATEGY_ISOLATE GGML_NUMA_STRATEGY_NUMACTL LLAMA_CONTEXT_TYPE_MTP
    LLAMA_KV_OVERRIDE_TYPE_BOOL LLAMA_KV_OVERRIDE_TYPE_FLOAT LLAMA_KV_OVERRIDE_TYPE_INT LLAMA_KV_OVERRIDE_TYPE_STR
    LLAMA_LOAD_MODE_MLOCK LLAMA_LOAD_MODE_MMAP LLAMA_LOAD_MODE_MMAP_MLOCK LLAMA_LOAD_MODE_NONE
    LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY LLAMA_TOKEN_ATTR_BYTE LLAMA_TOKEN_ATTR_CONTROL LLAMA_TOKEN_ATTR_LSTRIP
    LLAMA_TOKEN_ATTR_RSTRIP LLAMA_TOKEN_ATTR_UNKNOWN LLAMA_TOKEN_ATTR_UNUSED LLAMA_TOKEN_ATTR_USER_DEFINED
    LLAMA_TOKEN_NULL LLAMA_VOCAB_TYPE_BPE LLAMA_VOCAB_TYPE_SPM LLAMA_VOCAB_TYPE_WPM ggml_abort_callback
    llama_adapter_get_alora_n_invocation_tokens llama_adapter_lora_free llama_adapter_lora_init
    llama_adapter_lora_p_ctypes llama_backend_init llama_batch llama_batch_get_one llama_context_default_params
    llama_decode llama_encode llama_free llama_get_embeddings_seq llama_get_logits llama_get_memory
    llama_init_from_model llama_log_callback llama_log_set llama_logit_bias llama_max_devices
    llama_max_tensor_buft_overrides llama_memory_clear llama_memory_seq_cp llama_memory_seq_pos_max
    llama_memory_seq_pos_min llama_memory_seq_rm llama_model_chat_template llama_model_default_params
    llama_model_desc llama_model_free llama_model_get_vocab llama_model_has_decoder llama_model_has_encoder
    llama_model_is_hybrid llama_model_is_recurrent llama_model_kv_override llama_model_load_from_file
    llama_model_meta_count llama_model_meta_key_by_index llama_model_meta_val_str_by_index llama_model_n_cls_out
    llama_model_n_ctx_train llama_model_n_embd llama_model_n_embd_inp llama_model_n_layer llama_model_n_params
    llama_model_n_swa llama_model_size llama_n_batch llama_n_ctx_seq llama_n_rs_seq llama_n_ubatch llama_numa_init
    llama_pos llama_print_system_info llama_sampler_accept llama_sampler_apply llama_sampler_chain_add
    llama_sampler_chain_default_params llama_sampler_chain_init llama_sampler_free llama_sampler_init_adaptive_p
    llama_sampler_init_dist llama_sampler_init_dry llama_sampler_init_greedy llama_sampler_init_infill
    llama_sampler_init_logit_bias llama_sampler_init_min_p llama_sampler_init_mirostat llama_sampler_init_mirostat_v2
    llama_sampler_init_penalties llama_sampler_init_temp_ext llama_sampler_init_top_k llama_sampler_init_top_n_sigma
    llama_sampler_init_top_p llama_sampler_init_typical llama_sampler_init_xtc
    llama_seq_id llama_set_abort_callback llama_set_adapters_lora llama_set_causal_attn
    llama_set_n_threads llama_state_seq_get_data_ext llama_state_seq_get_size_ext
    llama_state_seq_set_data_ext llama_supports_gpu_offload llama_synchronize llama_token
    llama_token_data_array llama_token_data_p llama_token_p llama_token_to_piece llama_tokenize llama_version
    llama_vocab_bos llama_vocab_eos llama_vocab_eot llama_vocab_fim_mid llama_vocab_fim_pre llama_vocab_fim_rep
    llama_vocab_fim_sep llama_vocab_fim_suf llama_vocab_get_add_bos llama_vocab_get_add_eos llama_vocab_get_add_sep
    llama_vocab_get_attr llama_vocab_get_text llama_vocab_is_control llama_vocab_is_eog llama_vocab_n_tokens
    llama_vocab_sep llama_vocab_type
""")  # names in `llama_cpp.llama_cpp`

IMAGES = _words("""
    MTMD_INPUT_CHUNK_TYPE_TEXT mtmd_bitmap_free mtmd_bitmap_init mtmd_bitmap_p_ctypes mtmd_context_params_default
    mtmd_decode_use_mrope mtmd_decode_use_non_causal mtmd_encode_chunk mtmd_get_output_embd mtmd_helper_log_set
    mtmd_image_tokens_get_decoder_pos mtmd_init_from_file mtmd_input_chunk_get_n_pos mtmd_input_chunk_get_n_tokens
    mtmd_input_chunk_get_tokens_image mtmd_input_chunk_get_tokens_text mtmd_input_chunk_get_type
    mtmd_input_chunks_free mtmd_input_chunks_get mtmd_input_chunks_init
    mtmd_input_chunks_size mtmd_input_text mtmd_tokenize
""")  # names in `llama_cpp.mtmd_cpp`, for images only

SYMBOLS = _words("""
    ggml_backend_buft_name ggml_backend_dev_backend_reg ggml_backend_dev_buffer_type ggml_backend_dev_by_type
    ggml_backend_dev_count ggml_backend_dev_description ggml_backend_dev_get ggml_backend_dev_init
    ggml_backend_dev_memory ggml_backend_dev_name ggml_backend_dev_type ggml_backend_free ggml_backend_reg_count
    ggml_backend_reg_get ggml_backend_reg_get_proc_address ggml_backend_reg_name ggml_commit ggml_version
""")  # functions of ggml that the bindings do not declare, in the library that they load

FIELDS = {
    "llama_context_params": _words("""
        ctx_other ctx_type embeddings flash_attn_type kv_unified n_batch n_ctx n_outputs_max n_rs_seq n_seq_max
        n_threads n_threads_batch n_ubatch offload_kqv rope_freq_base rope_freq_scale rope_scaling_type swa_full
        type_k type_v yarn_orig_ctx
    """),
    "llama_model_params": _words("""
        check_tensors devices kv_overrides load_mode load_mtp main_gpu n_gpu_layers split_mode
        tensor_buft_overrides tensor_split use_extra_bufts vocab_only
    """),
    "mtmd_context_params": _words("""
        media_marker n_threads print_timings use_gpu warmup
    """),
}  # fields that are set, by structure


def lacking(bindings: ModuleType) -> list[str]:
    """Return what `llama_cpp.llama_cpp` and its library lack, for example "llama_model_params.load_mode"."""
    fields = _fields(bindings, ("llama_context_params", "llama_model_params"))
    symbols = [name for name in SYMBOLS if getattr(bindings._lib, name, None) is None]
    return [*(name for name in BINDINGS if not hasattr(bindings, name)), *fields, *symbols]


def lacking_for_images(mtmd: ModuleType) -> list[str]:
    """Return what `llama_cpp.mtmd_cpp` lacks."""
    return [*(name for name in IMAGES if not hasattr(mtmd, name)), *_fields(mtmd, ("mtmd_context_params",))]


def _fields(module: ModuleType, structures: tuple[str, ...]) -> list[str]:
    missing = []
    for structure in structures:
        there = {field[0] for field in getattr(getattr(module, structure, None), "_fields_", ())}
        missing += [f"{structure}.{name}" for name in FIELDS[structure] if name not in there]
    return missing


def few(names: list[str]) -> str:
    """Return the first names in words: "a, b and 7 more"."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
