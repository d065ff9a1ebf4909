/* Chromium lets pages use software Vulkan only if it is SwiftShader, which has no float16, or if it passes for a GPU that
   can share semaphores with the compositor (gpu/command_buffer/service/webgpu_decoder_impl.cc). This driver stands before
   Mesa's software Vulkan, whose library is in ONNXAMP_VULKAN, and shows it so: pages that draw nothing share nothing. The
   structures are the first fields of Vulkan's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { INCOMPLETE = 5, FAILED = -3, OPAQUE_FD = 1, EXPORTED_AND_IMPORTED = 3, DISCRETE_GPU = 2 };
static const char SHARED[] = "VK_KHR_external_semaphore_fd";

typedef void (*Function)(void);
typedef Function (*Find)(void *, const char *);
typedef struct { char name[256]; uint32_t version; } Extension;
typedef struct { uint32_t api, driver, vendor, device, kind; char name[256]; } Properties;
typedef struct { uint32_t type; void *next; Properties properties; } Properties2;
typedef struct { uint32_t type; void *next; uint32_t handle; } SemaphoreInfo;
typedef struct { uint32_t type; void *next; uint32_t from, compatible, features; } SemaphoreProperties;
typedef struct {
  uint32_t type; const void *next; uint32_t flags, queues; const void *queue; uint32_t layers; const char *const *layer;
  uint32_t count; const char *const *extensions; const void *features;
} DeviceInfo;

static int (*extensions)(void *, const char *, uint32_t *, Extension *);
static void (*properties)(void *, Properties *);
static void (*properties2)(void *, Properties2 *);
static void (*semaphores)(void *, const SemaphoreInfo *, SemaphoreProperties *);
static int (*create)(void *, const DeviceInfo *, const void *, void **);
static Find device_function;

static void *symbol(const char *name) {
  static void *driver;
  if (!driver) driver = dlopen(getenv("ONNXAMP_VULKAN"), RTLD_NOW | RTLD_LOCAL);
  return dlsym(driver, name);
}

static int all_extensions(void *device, const char *layer, uint32_t *count, Extension *found) {
  uint32_t own = 0;
  int status = layer ? 0 : extensions(device, 0, &own, 0);
  if (layer || status) return layer ? extensions(device, layer, count, found) : status;
  if (!found) { *count = own + 1; return 0; }
  if (*count <= own) { extensions(device, 0, count, found); return INCOMPLETE; }
  *count = own;
  status = extensions(device, 0, count, found);
  memset(&found[*count], 0, sizeof *found);
  strcpy(found[*count].name, SHARED);
  found[(*count)++].version = 1;
  return status;
}

static void all_properties(void *device, Properties *found) {
  properties(device, found);
  found->kind = DISCRETE_GPU;
}

static void all_properties2(void *device, Properties2 *found) {
  properties2(device, found);
  found->properties.kind = DISCRETE_GPU;
}

static void all_semaphores(void *device, const SemaphoreInfo *info, SemaphoreProperties *found) {
  semaphores(device, info, found);
  if (info->handle != OPAQUE_FD) return;
  found->from = found->compatible = OPAQUE_FD;
  found->features = EXPORTED_AND_IMPORTED;
}

static int create_device(void *device, const DeviceInfo *info, const void *allocator, void **made) {
  DeviceInfo own = *info;
  const char **kept = malloc((info->count + 1) * sizeof *kept);
  own.count = 0;
  for (uint32_t i = 0; i < info->count; i++)
    if (strcmp(info->extensions[i], SHARED)) kept[own.count++] = info->extensions[i];
  own.extensions = kept;
  int status = create(device, &own, allocator, made);
  free(kept);
  return status;
}

static int refuse(void) { return FAILED; }

static int shares(const char *name) {
  return !strcmp(name, "vkGetSemaphoreFdKHR") || !strcmp(name, "vkImportSemaphoreFdKHR");
}

static Function in_device(void *device, const char *name) {
  return shares(name) ? (Function)refuse : device_function(device, name);
}

static Function instead(const char *name, Function own) {
  static const struct { const char *name; void *kept; void *instead; } ALL[] = {
      {"vkEnumerateDeviceExtensionProperties", &extensions, all_extensions},
      {"vkGetPhysicalDeviceProperties", &properties, all_properties},
      {"vkGetPhysicalDeviceProperties2", &properties2, all_properties2},
      {"vkGetPhysicalDeviceProperties2KHR", &properties2, all_properties2},
      {"vkGetPhysicalDeviceExternalSemaphoreProperties", &semaphores, all_semaphores},
      {"vkGetPhysicalDeviceExternalSemaphorePropertiesKHR", &semaphores, all_semaphores},
      {"vkCreateDevice", &create, create_device},
      {"vkGetDeviceProcAddr", &device_function, in_device},
  };
  if (shares(name)) return (Function)refuse;
  for (size_t i = 0; own && i < sizeof ALL / sizeof *ALL; i++)
    if (!strcmp(name, ALL[i].name)) {
      *(Function *)ALL[i].kept = own;
      return (Function)ALL[i].instead;
    }
  return own;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  return instead(name, ((Find)symbol("vk_icdGetInstanceProcAddr"))(instance, name));
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  return instead(name, ((Find)symbol("vk_icdGetPhysicalDeviceProcAddr"))(instance, name));
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  return ((int (*)(uint32_t *))symbol("vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}
