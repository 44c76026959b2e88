/* A CUDA device from C: a few steps, and its memory back. Without one, says why and holds the status. */
#include "check.h"

int main(void) {
    terrace_device *device = (terrace_device *)(void *)&device;
    void *at[3][2], *first_base = NULL, *base = NULL;
    uint64_t bytes = 0;
    int step;
    terrace_status status = terrace_create_cuda(0, 64u << 20, &device);
    if (status == TERRACE_NO_DEVICE || status == TERRACE_NOT_BUILT) {
        CHECK(device == NULL && terrace_last_error()[0] != '\0');
        printf("%s: %s\n", terrace_status_name(status), terrace_last_error());
        return 0;
    }
    CHECK(status == TERRACE_OK);
    FAILS(terrace_create_cuda(1000, 64u << 20, &device), TERRACE_NO_DEVICE, "1000");
    CHECK(device == NULL);
    OK(terrace_create_cuda(0, 64u << 20, &device));
    OK(terrace_reservation(device, &first_base, &bytes));
    CHECK(bytes == 64u << 20);
    for (step = 0; step < 3; step++) {
        OK(terrace_begin_step(device, "step", 4, NULL));
        OK(terrace_alloc(device, 20u << 20, NULL, "a", &at[step][0]));
        OK(terrace_alloc(device, 30u << 20, NULL, "b", &at[step][1]));
        OK(terrace_free(device, at[step][0]));
        OK(terrace_free(device, at[step][1]));
        OK(terrace_end_step(device));
    }
    CHECK(memcmp(at[1], at[2], sizeof at[1]) == 0);
    CHECK(figure(device, "steps_on_script") == 2);
    OK(terrace_reservation(device, &base, &bytes));
    CHECK(base == first_base);
    CHECK(terrace_alloc(device, 65u << 20, NULL, "too large", &base) == TERRACE_OUT_OF_MEMORY);
    OK(terrace_destroy(device));
    puts("cuda");
    return 0;
}
