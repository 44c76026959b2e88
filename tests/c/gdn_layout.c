/* What terrace_gdn.h says in numbers, for the Rust side to compare. */
#include <stdio.h>

#include "terrace_gdn.h"

#define FIELD(type, field) printf(#type "." #field " %zu %zu\n", offsetof(type, field), sizeof(((type *)0)->field))
#define NUMBER(name) printf(#name " %lu\n", (unsigned long)(name))

int main(void) {
    NUMBER(TERRACE_GDN_VERSION);
    NUMBER(TERRACE_GDN_CPU);
    NUMBER(TERRACE_GDN_CUDA);
    NUMBER(TERRACE_GDN_BF16);
    NUMBER(TERRACE_GDN_FP16);
    NUMBER(TERRACE_GDN_FP32);
    NUMBER(TERRACE_GDN_FUSED);
    NUMBER(TERRACE_GDN_STAGED);
    NUMBER(sizeof(terrace_gdn_device));
    FIELD(terrace_gdn_device, kind);
    FIELD(terrace_gdn_device, ordinal);
    FIELD(terrace_gdn_device, stream);
    FIELD(terrace_gdn_device, threads);
    NUMBER(sizeof(terrace_gdn_tensor));
    FIELD(terrace_gdn_tensor, data);
    FIELD(terrace_gdn_tensor, token_stride);
    FIELD(terrace_gdn_tensor, head_stride);
    FIELD(terrace_gdn_tensor, dtype);
    NUMBER(sizeof(terrace_gdn_pool));
    FIELD(terrace_gdn_pool, data);
    FIELD(terrace_gdn_pool, slots);
    FIELD(terrace_gdn_pool, slot_stride);
    FIELD(terrace_gdn_pool, dtype);
    NUMBER(sizeof(terrace_gdn_prefill_args));
    FIELD(terrace_gdn_prefill_args, device);
    FIELD(terrace_gdn_prefill_args, tokens);
    FIELD(terrace_gdn_prefill_args, key_heads);
    FIELD(terrace_gdn_prefill_args, value_heads);
    FIELD(terrace_gdn_prefill_args, q);
    FIELD(terrace_gdn_prefill_args, k);
    FIELD(terrace_gdn_prefill_args, v);
    FIELD(terrace_gdn_prefill_args, g);
    FIELD(terrace_gdn_prefill_args, beta);
    FIELD(terrace_gdn_prefill_args, o);
    FIELD(terrace_gdn_prefill_args, host_cu_seqlens);
    FIELD(terrace_gdn_prefill_args, sequences);
    FIELD(terrace_gdn_prefill_args, host_chunk_indices);
    FIELD(terrace_gdn_prefill_args, chunks);
    FIELD(terrace_gdn_prefill_args, host_chunk_offsets);
    FIELD(terrace_gdn_prefill_args, initial);
    FIELD(terrace_gdn_prefill_args, host_initial_slots);
    FIELD(terrace_gdn_prefill_args, host_has_initial);
    FIELD(terrace_gdn_prefill_args, last);
    FIELD(terrace_gdn_prefill_args, host_last_slots);
    FIELD(terrace_gdn_prefill_args, in_place);
    FIELD(terrace_gdn_prefill_args, checkpoint_every);
    FIELD(terrace_gdn_prefill_args, checkpoints);
    FIELD(terrace_gdn_prefill_args, scale);
    FIELD(terrace_gdn_prefill_args, l2norm);
    FIELD(terrace_gdn_prefill_args, window);
    FIELD(terrace_gdn_prefill_args, design);
    FIELD(terrace_gdn_prefill_args, workspace);
    FIELD(terrace_gdn_prefill_args, workspace_bytes);
    NUMBER(sizeof(terrace_gdn_decode_args));
    FIELD(terrace_gdn_decode_args, device);
    FIELD(terrace_gdn_decode_args, tokens);
    FIELD(terrace_gdn_decode_args, key_heads);
    FIELD(terrace_gdn_decode_args, value_heads);
    FIELD(terrace_gdn_decode_args, q);
    FIELD(terrace_gdn_decode_args, k);
    FIELD(terrace_gdn_decode_args, v);
    FIELD(terrace_gdn_decode_args, g);
    FIELD(terrace_gdn_decode_args, beta);
    FIELD(terrace_gdn_decode_args, o);
    FIELD(terrace_gdn_decode_args, cu_seqlens);
    FIELD(terrace_gdn_decode_args, slots);
    FIELD(terrace_gdn_decode_args, sequences);
    FIELD(terrace_gdn_decode_args, pool);
    FIELD(terrace_gdn_decode_args, scale);
    FIELD(terrace_gdn_decode_args, l2norm);
    NUMBER(sizeof(terrace_gdn_path));
    FIELD(terrace_gdn_path, windows);
    FIELD(terrace_gdn_path, chunks);
    FIELD(terrace_gdn_path, launches);
    FIELD(terrace_gdn_path, table_bytes);
    FIELD(terrace_gdn_path, route);
    FIELD(terrace_gdn_path, arch);
    FIELD(terrace_gdn_path, why);
    NUMBER(TERRACE_GDN_OK);
    NUMBER(TERRACE_GDN_BAD_ARGUMENT);
    NUMBER(TERRACE_GDN_NO_DEVICE);
    NUMBER(TERRACE_GDN_NO_COMPILER);
    NUMBER(TERRACE_GDN_DRIVER);
    NUMBER(TERRACE_GDN_NOT_BUILT);
    NUMBER(TERRACE_GDN_FORKED);
    NUMBER(TERRACE_GDN_PANIC);
    NUMBER(TERRACE_GDN_OTHER);
    return 0;
}
