/* A stand-in for the NVIDIA driver's library, for tests: libnvidia-ml.so.1, driven by the file that NVML_SCENARIO names.

   It exports what nvidia-ml-py calls, with the driver's structures and codes, and reads the file anew at each call, so
   that devices come, go, hang and fail while a worker runs. One fact a line, fields between bars:

     driver|550.54.15
     gpu|slot|name|uuid|bus id|total|reserved|used|utilisation|mig (0 or 1)
     slice|slot|name|uuid|total|used
     process|slot|pid|bytes or -|c or g (compute, graphics)
     xid|sequence|slot|code
     fail|function|code            fail|function:slot|code            hang|function            hang|function:slot
     noise|function                (it prints to the standard output)

   A GPU's index is its place among the gpu lines. A handle whose line has gone answers that the GPU is lost. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define INVALID 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT 7
#define TIMEOUT 10
#define LOST 15
#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFull
#define MIG_SLOT 1000
#define XID_EVENT 8ull

typedef unsigned long long u64;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; u64 memory; unsigned gi, ci; } process_t;
typedef struct { unsigned gpu, memory; } use_t;
typedef struct { void *device; u64 type, data; unsigned gi, ci; } event_t;

typedef struct { int slot, place, mig; char name[96], uuid[96], bus[32]; u64 total, reserved, used; unsigned busy; } gpu_t;
typedef struct { int last; } events_t;

static FILE *open_scenario(void) {
  const char *path = getenv("NVML_SCENARIO");
  return path ? fopen(path, "r") : NULL;
}

/* splits a line at its bars; how many fields */
static int fields(char *line, char **out, int most) {
  int n = 0;
  line[strcspn(line, "\n")] = 0;
  for (char *p = line; p && n < most; n++) {
    out[n] = p;
    p = strchr(p, '|');
    if (p) *p++ = 0;
  }
  return n;
}

static int next(FILE *f, const char *kind, char *line, size_t size, char **out) {
  while (fgets(line, size, f)) {
    int n = fields(line, out, 12);
    if (n && !strcmp(out[0], kind)) return n;
  }
  return 0;
}

static int slot_of(void *handle) { return (int)(size_t)handle - 1; }
static void *handle_of(int slot) { return (void *)(size_t)(slot + 1); }

/* hangs or fails as the scenario says for this function, or for this function and this device */
static int fault(const char *function, int slot) {
  char line[512], *v[12], exact[160];
  int code = SUCCESS, hang = 0;
  snprintf(exact, sizeof exact, "%s:%d", function, slot);
  FILE *f = open_scenario();
  if (!f) return 9;
  while (fgets(line, sizeof line, f)) {
    int n = fields(line, v, 12);
    if (n < 2 || (strcmp(v[1], function) && strcmp(v[1], exact))) continue;
    if (!strcmp(v[0], "fail") && n > 2) code = atoi(v[2]);
    if (!strcmp(v[0], "hang")) hang = 1;
    if (!strcmp(v[0], "noise")) { printf("NVRM: {\"report\": 1}\n"); fflush(stdout); }
  }
  fclose(f);
  while (hang) pause();
  return code;
}

/* the nth gpu line, or the one of a slot where nth is negative */
static int find_gpu(int nth, int slot, gpu_t *out) {
  char line[512], *v[12];
  int place = 0, found = 0;
  FILE *f = open_scenario();
  if (!f) return 0;
  while (!found && next(f, "gpu", line, sizeof line, v) >= 10) {
    if (nth < 0 ? atoi(v[1]) == slot : place == nth) {
      out->slot = atoi(v[1]), out->place = place, out->mig = atoi(v[9]), out->busy = atoi(v[8]);
      out->total = strtoull(v[5], 0, 10), out->reserved = strtoull(v[6], 0, 10), out->used = strtoull(v[7], 0, 10);
      snprintf(out->name, sizeof out->name, "%s", v[2]);
      snprintf(out->uuid, sizeof out->uuid, "%s", v[3]);
      snprintf(out->bus, sizeof out->bus, "%s", v[4]);
      found = 1;
    }
    place++;
  }
  fclose(f);
  return found;
}

static int find_slice(int slot, int nth, gpu_t *out) {
  char line[512], *v[12];
  int place = 0, found = 0;
  FILE *f = open_scenario();
  if (!f) return 0;
  while (!found && next(f, "slice", line, sizeof line, v) >= 6) {
    if (atoi(v[1]) != slot || place++ != nth) continue;
    memset(out, 0, sizeof *out);
    out->slot = slot, out->total = strtoull(v[4], 0, 10), out->used = strtoull(v[5], 0, 10);
    snprintf(out->name, sizeof out->name, "%s", v[2]);
    snprintf(out->uuid, sizeof out->uuid, "%s", v[3]);
    found = 1;
  }
  fclose(f);
  return found;
}

/* what a handle is: a GPU, or a slice as slot * MIG_SLOT + number + MIG_SLOT */
static int find(void *handle, gpu_t *out) {
  int slot = slot_of(handle);
  return slot >= MIG_SLOT ? find_slice(slot / MIG_SLOT - 1, slot % MIG_SLOT, out) : find_gpu(-1, slot, out);
}

#define BEGIN(name, handle) \
  gpu_t g; \
  int code = fault(name, slot_of(handle)); \
  if (code) return code; \
  if (!find(handle, &g)) return LOST

static int copy(char *out, unsigned size, const char *text) {
  if (strlen(text) + 1 > size) return INSUFFICIENT;
  strcpy(out, text);
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return fault("nvmlInitWithFlags", -1); }
int nvmlInit_v2(void) { return fault("nvmlInit_v2", -1); }
int nvmlShutdown(void) { return fault("nvmlShutdown", -1); }
const char *nvmlErrorString(int code) { (void)code; return "Stand-in Error"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  char line[512], *v[12];
  int code = fault("nvmlSystemGetDriverVersion", -1);
  if (code) return code;
  FILE *f = open_scenario();
  if (!f) return 9;
  code = next(f, "driver", line, sizeof line, v) > 1 ? copy(out, size, v[1]) : NOT_SUPPORTED;
  fclose(f);
  return code;
}

int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
  int code = fault("nvmlSystemGetProcessName", -1);
  char text[64];
  snprintf(text, sizeof text, "/usr/bin/program-%u --secret", pid);
  return code ? code : copy(out, size, text);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  gpu_t g;
  int code = fault("nvmlDeviceGetCount_v2", -1);
  if (code) return code;
  for (*count = 0; find_gpu((int)*count, 0, &g);) ++*count;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  gpu_t g;
  if (!find_gpu((int)index, 0, &g)) return INVALID;
  *out = handle_of(g.slot);
  return fault("nvmlDeviceGetHandleByIndex_v2", g.slot);
}

int nvmlDeviceGetName(void *d, char *out, unsigned size) { BEGIN("nvmlDeviceGetName", d); return copy(out, size, g.name); }
int nvmlDeviceGetUUID(void *d, char *out, unsigned size) { BEGIN("nvmlDeviceGetUUID", d); return copy(out, size, g.uuid); }

int nvmlDeviceGetPciInfo_v3(void *d, pci_t *out) {
  BEGIN("nvmlDeviceGetPciInfo_v3", d);
  memset(out, 0, sizeof *out);
  snprintf(out->bus_id, sizeof out->bus_id, "%s", g.bus);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *d, memory_t *out) {
  BEGIN("nvmlDeviceGetMemoryInfo", d);
  out->total = g.total, out->used = g.used + g.reserved, out->free = g.total - g.used - g.reserved;
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *d, memory_v2_t *out) {
  BEGIN("nvmlDeviceGetMemoryInfo_v2", d);
  if (out->version != (sizeof *out | 2u << 24)) return 25;
  out->total = g.total, out->reserved = g.reserved, out->used = g.used, out->free = g.total - g.used - g.reserved;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *d, use_t *out) {
  BEGIN("nvmlDeviceGetUtilizationRates", d);
  out->gpu = g.busy, out->memory = 0;
  return SUCCESS;
}

int nvmlDeviceGetMigMode(void *d, unsigned *current, unsigned *pending) {
  BEGIN("nvmlDeviceGetMigMode", d);
  *current = *pending = (unsigned)g.mig;
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *count) {
  BEGIN("nvmlDeviceGetMaxMigDeviceCount", d);
  *count = 7;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned index, void **out) {
  BEGIN("nvmlDeviceGetMigDeviceHandleByIndex", d);
  gpu_t part;
  if (!find_slice(g.slot, (int)index, &part)) return NOT_FOUND;
  *out = handle_of((g.slot + 1) * MIG_SLOT + (int)index);
  return SUCCESS;
}

static int processes(const char *function, void *d, unsigned *count, process_t *out, char kind) {
  char line[512], *v[12];
  BEGIN(function, d);
  unsigned room = *count, n = 0;
  FILE *f = open_scenario();
  if (!f) return 9;
  while (next(f, "process", line, sizeof line, v) >= 5) {
    if (atoi(v[1]) != g.slot || v[4][0] != kind) continue;
    if (n < room && out) {
      memset(&out[n], 0, sizeof out[n]);
      out[n].pid = (unsigned)atoi(v[2]);
      out[n].memory = v[3][0] == '-' ? NOT_AVAILABLE : strtoull(v[3], 0, 10);
    }
    n++;
  }
  fclose(f);
  *count = n;
  return n > room ? INSUFFICIENT : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, process_t *out) {
  return processes("nvmlDeviceGetComputeRunningProcesses_v3", d, count, out, 'c');
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *count, process_t *out) {
  return processes("nvmlDeviceGetGraphicsRunningProcesses_v3", d, count, out, 'g');
}

/* the first xid line behind a sequence number; the number, 0 if there is none */
static int next_xid(int after, int *slot, int *xid) {
  char line[512], *v[12];
  int found = 0;
  FILE *f = open_scenario();
  if (!f) return 0;
  while (!found && next(f, "xid", line, sizeof line, v) >= 4)
    if (atoi(v[1]) > after) found = atoi(v[1]), *slot = atoi(v[2]), *xid = atoi(v[3]);
  fclose(f);
  return found;
}

int nvmlEventSetCreate(void **out) {
  int code = fault("nvmlEventSetCreate", -1), slot, xid, seen;
  if (code) return code;
  events_t *set = calloc(1, sizeof *set);
  while ((seen = next_xid(set->last, &slot, &xid))) set->last = seen;
  *out = set;
  return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *d, u64 types, void *set) {
  (void)types, (void)set;
  BEGIN("nvmlDeviceRegisterEvents", d);
  return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, event_t *out, unsigned timeout_ms) {
  events_t *events = set;
  int slot, xid;
  int code = fault("nvmlEventSetWait_v2", -1);
  if (code) return code;
  for (unsigned waited = 0; waited <= timeout_ms; waited += 10) {
    int seen = next_xid(events->last, &slot, &xid);
    if (seen) {
      events->last = seen;
      memset(out, 0, sizeof *out);
      out->device = handle_of(slot), out->type = XID_EVENT, out->data = (u64)xid;
      return SUCCESS;
    }
    usleep(10000);
  }
  return TIMEOUT;
}

int nvmlEventSetFree(void *set) { free(set); return SUCCESS; }
