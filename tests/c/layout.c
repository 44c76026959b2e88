/* What the header says in numbers, for the Rust side to compare. */
#include <stdio.h>

#include "terrace.h"

#define FIELD(type, field) \
    printf(#type "." #field " %zu %zu\n", offsetof(type, field), sizeof(((type *)0)->field))
#define NUMBER(name) printf(#name " %lu\n", (unsigned long)(name))

int main(void) {
    NUMBER(TERRACE_VERSION);
    NUMBER(TERRACE_HOST);
    NUMBER(TERRACE_CUDA);
    NUMBER(sizeof(terrace_options));
    FIELD(terrace_options, size);
    FIELD(terrace_options, budget);
    FIELD(terrace_options, align);
    FIELD(terrace_options, backing);
    FIELD(terrace_options, ordinal);
    FIELD(terrace_options, debug);
    FIELD(terrace_options, patience);
    FIELD(terrace_options, most_keys);
    FIELD(terrace_options, reserved);
    NUMBER(sizeof(terrace_pool));
    FIELD(terrace_pool, first);
    FIELD(terrace_pool, second);
    NUMBER(sizeof(terrace_status));
    NUMBER(TERRACE_OK);
    NUMBER(TERRACE_OUT_OF_MEMORY);
    NUMBER(TERRACE_BAD_ARGUMENT);
    NUMBER(TERRACE_NO_DEVICE);
    NUMBER(TERRACE_NOT_BUILT);
    NUMBER(TERRACE_DRIVER);
    NUMBER(TERRACE_STEP_OPEN);
    NUMBER(TERRACE_NO_STEP);
    NUMBER(TERRACE_NO_SUCH_POOL);
    NUMBER(TERRACE_NOT_LIVE);
    NUMBER(TERRACE_NOT_EMPTY);
    NUMBER(TERRACE_FORKED);
    NUMBER(TERRACE_PANIC);
    NUMBER(TERRACE_OTHER);
    return 0;
}
