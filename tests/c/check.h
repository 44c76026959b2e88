/* Checks for the C and C++ test programs: the first that fails ends the program with its place and the last error. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "terrace.h"

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "%s:%d: not so: %s\n  last error: %s\n", __FILE__, __LINE__, #condition,            \
                    terrace_last_error());                                                                     \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

#define OK(call) CHECK((call) == TERRACE_OK)

/* That a call fails with this status, and that the text says this. */
#define FAILS(call, status, text)                                                                              \
    do {                                                                                                       \
        CHECK((call) == (status));                                                                             \
        CHECK(strstr(terrace_last_error(), text) != NULL);                                                     \
    } while (0)

/* A figure of the device's JSON: the number after the name. */
static unsigned long long figure(terrace_device *device, const char *name) {
    char json[4096], quoted[64];
    size_t length = 0;
    const char *at;
    OK(terrace_stats_json(device, json, sizeof json, &length));
    CHECK(length < sizeof json && strlen(json) == length);
    CHECK(json[0] == '{' && json[length - 1] == '}');
    snprintf(quoted, sizeof quoted, "\"%s\":", name);
    at = strstr(json, quoted);
    CHECK(at != NULL);
    return strtoull(at + strlen(quoted), NULL, 10);
}

#endif
