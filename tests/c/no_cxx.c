/* A failed request where no C++ is loaded: there is nobody to throw to, so the text is printed and the process aborted. */
#include <stdio.h>

#include "terrace.h"

int main(void) {
    void *at = terrace_torch_malloc(1024, 0, NULL);
    if (at == NULL) return 1;
    terrace_torch_free(at, 1024, 0, NULL);
    puts("served");
    fflush(NULL);
    terrace_torch_malloc((size_t)1 << 30, 0, NULL);
    return 2;
}
