/* onnxruntime-ep-openvino offers a CPU only where Intel made it, although OpenVINO runs on every x86-64
   (microsoft/onnxruntime #31981). This library stands before the plugin, whose path is compiled in as PLUGIN, and shows it
   any CPU as Intel's. The structures are the first fields of ONNX Runtime's OrtHardwareDevice and OrtEpFactory. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { CPU = 0, INTEL = 0x8086, MOST = 16 };

typedef struct { int32_t kind; uint32_t vendor; } Hardware;
typedef struct Factory Factory;
typedef void *(*Offer)(Factory *, const Hardware *const *, size_t, void **, size_t, size_t *);
struct Factory { uint32_t version; void *name, *vendor; Offer offer; };
typedef void *(*Create)(const char *, const void *, const void *, Factory **, size_t, size_t *);
typedef void *(*Release)(Factory *);

static Factory *factories[MOST];
static Offer offers[MOST];
static size_t known;

static void *symbol(const char *name) {
  static void *plugin;
  if (!plugin) plugin = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
  return dlsym(plugin, name);
}

static void *offer(Factory *factory, const Hardware *const *found, size_t count, void **out, size_t most, size_t *got) {
  Offer next = 0;
  uint32_t vendors[MOST];
  count = count < MOST ? count : MOST;
  for (size_t i = 0; i < known; i++)
    if (factories[i] == factory) next = offers[i];
  for (size_t i = 0; i < count; i++) {
    vendors[i] = found[i]->vendor;
    if (found[i]->kind == CPU) ((Hardware *)found[i])->vendor = INTEL;
  }
  void *status = next(factory, found, count, out, most, got);
  for (size_t i = 0; i < count; i++) ((Hardware *)found[i])->vendor = vendors[i];
  return status;
}

void *CreateEpFactories(const char *name, const void *base, const void *logger, Factory **out, size_t most, size_t *got) {
  void *status = ((Create)symbol("CreateEpFactories"))(name, base, logger, out, most, got);
  for (size_t i = 0; !status && i < *got && known < MOST; i++) {
    factories[known] = out[i];
    offers[known++] = out[i]->offer;
    out[i]->offer = offer;
  }
  return status;
}

void *ReleaseEpFactory(Factory *factory) { return ((Release)symbol("ReleaseEpFactory"))(factory); }
