// The part of cuBLAS that linear layers and attention call, for the imagined CUDA: handles come and go, products are not computed.
// Written against the ABI, like driver.cc; what is asked for beside handles is answered so that PyTorch goes on.

#include <cstddef>
#include <cstring>

#include "fake.h"

// Whatever it is given, it is done.
#define DONE(name) \
    extern "C" int name() { return 0; }

DONE(cublasDestroy_v2)
DONE(cublasSetStream_v2)
DONE(cublasSetWorkspace_v2)
DONE(cublasSetMathMode)
DONE(cublasSetPointerMode_v2)
DONE(cublasSgemm_v2)
DONE(cublasSgemv_v2)
DONE(cublasSgemmEx)
DONE(cublasSgemmStridedBatched)
DONE(cublasGemmEx)
DONE(cublasGemmStridedBatchedEx)
DONE(cublasLtMatmul)
DONE(cublasLtMatmulDescDestroy)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulPreferenceDestroy)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatrixLayoutDestroy)
DONE(cublasLtMatrixLayoutSetAttribute)

extern "C" {

int cublasCreate_v2(void **handle) { return made(handle), 0; }
int cublasGetMathMode(void *, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0, 0; }
int cublasLtMatmulDescCreate(void **desc, int, int) { return made(desc), 0; }
int cublasLtMatmulPreferenceCreate(void **preference) { return made(preference), 0; }
int cublasLtMatrixLayoutCreate(void **layout, int, unsigned long, unsigned long, long) { return made(layout), 0; }

// One algorithm of no workspace: eight words of algorithm, then workspace, state, waves and four reserved numbers.
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *found, int *count) {
    std::memset(found, 0, 8 * 8 + 8 + 4 + 4 + 4 * 4);
    return *count = 1, 0;
}

}  // extern "C"
