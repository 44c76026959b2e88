/* Loads a C++ library for itself alone, as Python loads an extension: its libstdc++ is not among the symbols that every
 * object sees. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **arguments) {
    void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    void *symbol = library ? dlsym(library, "torch_main") : NULL;
    int (*torch_main)(void);
    if (symbol == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    if (dlsym(RTLD_DEFAULT, "_ZSt21__throw_runtime_errorPKc") != NULL) {
        fprintf(stderr, "libstdc++ is among the symbols of the process: this shows nothing\n");
        return 1;
    }
    /* A function pointer and a data pointer are of one size here, which ISO C does not promise. */
    memcpy(&torch_main, &symbol, sizeof torch_main);
    return torch_main();
}
