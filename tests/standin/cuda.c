/* A stand-in for the libraries of CUDA, with which ONNX Runtime's CUDA provider can be asked, on a machine without a GPU,
 * where it places each node and what it fuses: that is decided before anything runs.
 *
 * Nothing is computed. Kernels are launched and do nothing, so what they should have written stays zero; the device's
 * memory is the host's. Functions that are not here do nothing, too, and succeed (build.py adds them). Numbers of
 * attributes and offsets of fields are those of CUDA 13.0 (cuda_runtime_api.h, driver_types.h) and of cuDNN 9
 * (cudnn_graph.h); the device is what an H100 says of itself.
 */
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned char byte;

enum { MAJOR = 9, MINOR = 0, PROCESSORS = 132, WARP = 32, BLOCK = 1024, THREADS = 2048 };
static const size_t MEMORY = 80ul << 30, SHARED = 48ul << 10, SHARED_OPTIN = 227ul << 10, SHARED_ALL = 228ul << 10;
static const char NAME[] = "stand-in, no GPU";
static char handle[4096]; /* whatever is created is this */
static size_t used = 500ul << 20; /* what a context takes */

/* Devices */
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, NAME, size); return 0; }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = BLOCK; break;         /* cudaDevAttrMaxThreadsPerBlock */
    case 8: *value = SHARED; break;        /* cudaDevAttrMaxSharedMemoryPerBlock */
    case 10: *value = WARP; break;         /* cudaDevAttrWarpSize */
    case 16: *value = PROCESSORS; break;   /* cudaDevAttrMultiProcessorCount */
    case 39: *value = THREADS; break;      /* cudaDevAttrMaxThreadsPerMultiProcessor */
    case 75: *value = MAJOR; break;        /* cudaDevAttrComputeCapabilityMajor */
    case 76: *value = MINOR; break;        /* cudaDevAttrComputeCapabilityMinor */
    case 81: *value = SHARED_ALL; break;   /* cudaDevAttrMaxSharedMemoryPerMultiprocessor */
    case 97: *value = SHARED_OPTIN; break; /* cudaDevAttrMaxSharedMemoryPerBlockOptin */
    default: *value = 0;
    }
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}

int cudaGetDeviceProperties(byte *found, int device) {
    memset(found, 0, 1008);
    memcpy(found, NAME, sizeof NAME);
    *(size_t *)(found + 288) = MEMORY;       /* totalGlobalMem */
    *(size_t *)(found + 296) = SHARED;       /* sharedMemPerBlock */
    *(int *)(found + 304) = 65536;           /* regsPerBlock */
    *(int *)(found + 308) = WARP;            /* warpSize */
    *(int *)(found + 320) = BLOCK;           /* maxThreadsPerBlock */
    *(int *)(found + 324) = BLOCK;           /* maxThreadsDim[0] */
    *(int *)(found + 328) = BLOCK;
    *(int *)(found + 332) = 64;
    *(int *)(found + 336) = 2147483647;      /* maxGridSize[0] */
    *(int *)(found + 340) = 65535;
    *(int *)(found + 344) = 65535;
    *(int *)(found + 360) = MAJOR;           /* major */
    *(int *)(found + 364) = MINOR;           /* minor */
    *(int *)(found + 384) = PROCESSORS;      /* multiProcessorCount */
    *(int *)(found + 596) = 50 << 20;        /* l2CacheSize */
    *(int *)(found + 604) = THREADS;         /* maxThreadsPerMultiProcessor */
    *(size_t *)(found + 624) = SHARED_ALL;   /* sharedMemPerMultiprocessor */
    *(size_t *)(found + 672) = SHARED_OPTIN; /* sharedMemPerBlockOptin */
    return 0;
}

/* Memory: the host's, counted */
int cudaMalloc(void **found, size_t size) {
    *found = aligned_alloc(256, (size + 256) / 256 * 256);
    if (*found == NULL) return 2; /* cudaErrorMemoryAllocation */
    memset(*found, 0, size);
    used += malloc_usable_size(*found);
    return 0;
}
int cudaFree(void *pointer) {
    used -= malloc_usable_size(pointer);
    free(pointer);
    return 0;
}
int cudaMallocFromPoolAsync(void **found, size_t size, void *pool, void *stream) { return cudaMalloc(found, size); }
int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }
int cudaMallocHost(void **found, size_t size) { *found = calloc(1, size + 1); return *found ? 0 : 2; }
int cudaHostAlloc(void **found, size_t size, unsigned flags) { return cudaMallocHost(found, size); }
int cudaFreeHost(void *pointer) { free(pointer); return 0; }
int cudaMemGetInfo(size_t *left, size_t *all) { *left = MEMORY - used; *all = MEMORY; return 0; }
int cuMemGetInfo_v2(size_t *left, size_t *all) { return cudaMemGetInfo(left, all); }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { memmove(to, from, size); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { memmove(to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { memmove(to, from, size); return 0; }
int cudaMemset(void *to, int value, size_t size) { memset(to, value, size); return 0; }
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) { memset(to, value, size); return 0; }
int cudaMemPoolGetAttribute(void *pool, int attribute, unsigned long *value) { *value = 0; return 0; }
int cudaPointerGetAttributes(void *found, const void *pointer) {
    memset(found, 0, 88);
    *(int *)found = 2; /* cudaMemoryTypeDevice */
    ((const void **)found)[1] = ((const void **)found)[2] = pointer;
    return 0;
}

/* Kernels, streams, graphs */
void **__cudaRegisterFatBinary(void *binary) { return (void **)handle; }
int cudaFuncGetAttributes(byte *found, const void *kernel) { memset(found, 0, 144); *(int *)(found + 24) = BLOCK; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int block, size_t shared,
                                                           unsigned flags) { *blocks = 1; return 0; }
int cudaLibraryLoadData(void **found) { *found = handle; return 0; }
int cudaLibraryGetKernel(void **found) { *found = handle; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long flags, int *state) {
    *found = NULL;
    if (state) *state = 1; /* cudaDriverEntryPointSymbolNotFound */
    return 0;
}
int cudaStreamIsCapturing(void *stream, int *state) { *state = 0; return 0; }
int cudaStreamEndCapture(void *stream, void **graph) { *graph = handle; return 0; }
int cudaGraphInstantiate(void **found, void *graph, unsigned long flags) { *found = handle; return 0; }
int cudaEventElapsedTime(float *milliseconds, void *from, void *to) { *milliseconds = 1; return 0; }
const char *cudaGetErrorString(int code) { return "the stand-in cannot do this"; }
const char *cudaGetErrorName(int code) { return "cudaStandIn"; }
const char *cublasGetStatusName(int code) { return "cublasStandIn"; }
const char *cublasGetStatusString(int code) { return "the stand-in cannot do this"; }
int cublasGetMathMode(void *cublas, int *mode) { *mode = 0; return 0; }

/* cuDNN: one way to do everything, which needs no memory */
size_t cudnnGetVersion(void) { return 91300; }
const char *cudnnGetErrorString(int code) { return "the stand-in cannot do this"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
int cudnnDropoutGetStatesSize(void *cudnn, size_t *size) { *size = 1024; return 0; }
int cudnnGetConvolutionForwardWorkspaceSize(void *cudnn, void *x, void *w, void *conv, void *y, int algorithm,
                                            size_t *size) { *size = 0; return 0; }
int cudnnGetReductionWorkspaceSize(void *cudnn, void *how, void *from, void *to, size_t *size) { *size = 0; return 0; }
int cudnnGetReductionIndicesSize(void *cudnn, void *how, void *from, void *to, size_t *size) { *size = 0; return 0; }
int cudnnGetRNNTempSpaceSizes(void *cudnn, void *rnn, int mode, void *x, size_t *work, size_t *reserve) {
    if (work) *work = 0;
    if (reserve) *reserve = 0;
    return 0;
}
int cudnnGetRNNWeightParams(void *cudnn, void *rnn, int layer, size_t size, void *space, int id, void *matrix,
                            void **matrix_at, void *bias, void **bias_at) {
    *matrix_at = *bias_at = space;
    return 0;
}
int cudnnGetTensorNdDescriptor(void *tensor, int wanted, int *type, int *rank, int *dims, int *strides) {
    *type = 0;
    *rank = wanted < 3 ? wanted : 3;
    for (int i = 0; i < wanted; i++) dims[i] = strides[i] = 1;
    return 0;
}
int cudnnBackendCreateDescriptor(int type, void **found) { *found = handle; return 0; }
int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, long wanted, long *count, void *found) {
    const int results = attribute == 202; /* CUDNN_ATTR_ENGINEHEUR_RESULTS: one engine */
    if (count) *count = results || wanted == 1;
    if (found && wanted > 0 && !results && type != 0 && type != 15) /* neither handles nor descriptors */
        memset(found, 0, 4);
    return 0;
}
