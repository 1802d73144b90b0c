"""Tells the log of fields of requests that no API has: most likely they are misspelt, and they do nothing.

Fields that clients send and that mean nothing to this server (`user`, `store`, `cache_control`) are known and not told
of. Knows names only, never values, which may be prompts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

log = logging.getLogger("rest_local.server")

MOST = 100  # names that are told of in the life of a process: a client can send any number
_NAME = re.compile(r"[A-Za-z][\w.-]{0,39}")

_OPENAI = """
    audio background best_of client_metadata context_management conversation dimensions echo encoding_format
    frequency_penalty function_call functions include input instructions logit_bias logprobs max_completion_tokens
    max_output_tokens max_tool_calls metadata modalities moderation n parallel_tool_calls previous_response_id
    prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning reasoning_effort response_format
    safety_identifier service_tier store stream_options text tool_choice tools top_logprobs truncation user
    verbosity web_search_options
"""
_LLAMA_SERVER = """
    adaptive_decay adaptive_target add_special backend_sampling cache_prompt chat_format continue_final_message
    dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_range embd_normalize generation_prompt grammar_lazy grammar_triggers grammar_type id_slot image_data
    input_extra input_prefix input_suffix lora min_keep mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl
    n_discard n_indent n_probs parse_tool_calls penalize_nl penalty_prompt post_sampling_probs preserved_tokens
    reasoning_budget_message reasoning_budget_tokens reasoning_control reasoning_format reasoning_in_content
    response_fields return_progress return_tokens slot_id sse_ping_interval system_prompt t_max_prompt_ms tfs_z
    thinking_budget_tokens thinking_forced_open timings_per_token top_n_sigma typical_p with_pieces xtc_probability
    xtc_threshold
"""
_ANTHROPIC = """
    anthropic_beta anthropic_version betas cache_control container diagnostics inference_geo mcp_servers
    output_config output_format speed stop_sequences system thinking thread
"""
_OLLAMA = """
    context format images keep_alive name options raw shift suffix template think truncate
"""
# Of vLLM, OpenRouter and others: clients of several servers send them to each.
_OTHERS = """
    add_generation_prompt allowed_token_ids bad_words chat_id chat_template chat_template_kwargs documents
    early_stopping enable_thinking extra_body features files filter_options guided_choice guided_grammar guided_json
    guided_regex id include_reasoning include_stop_str_in_output length_penalty logits_processors
    mm_processor_kwargs min_tokens models num_ctx plugins priority prompt_logprobs provider repetition_penalty
    request_id route session_id skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs
    template_kwargs tool_ids top_a transforms truncate_prompt_tokens usage use_beam_search variables
"""
IGNORED = frozenset(" ".join((_OPENAI, _LLAMA_SERVER, _ANTHROPIC, _OLLAMA, _OTHERS)).split())

_told: set[str] = set()


def tell(given: Iterable[str], known: Collection[str], own: Collection[str]) -> None:
    """Log a warning for each name of `given` that is in none of the APIs, once in this process. `known`: the fields of
    the call; `own`: those below `rest_local`.
    """
    for name in given:
        if name in known or name in IGNORED or name in _told or len(_told) >= MOST or not _NAME.fullmatch(name):
            continue
        _told.add(name)
        near = get_close_matches(name, [*known, *own], 1)
        place = "rest_local." if near and near[0] not in known else ""
        meant = f"; did you mean {place}{near[0]}?" if near else ""
        log.warning("field %s of a request is unknown and does nothing%s", name, meant)
