/* libnvidia-ml.so.1 for tests: the calls that the probe uses, answered from a scenario.
 *
 * The scenario is the file NAME.scenario beside the library (found by dladdr), read anew at every call, so that a test
 * may change the world under a running probe. One `key value` a line; `gpu` begins the next GPU:
 *
 *   driver 580.159.03 | nvml TEXT | cuda 13000 | init CODE (what nvmlInit returns) | hang SECONDS | lag MILLISECONDS
 *   still 1 (do not look who holds: for measuring)
 *   gpu
 *   uuid TEXT | name TEXT | pci 00000000:00:06.0 | minor N | lost 1 | total, reserved, base BYTES | load, memload PERCENT
 *   power, limit MILLIWATT | temp, templimit C | clock, memclock, clockmax MHZ | throttle BITS | ecc, eccsum N
 *   gen, genmax, width, widthmax N | persistence 0/1 | mig 0/1 | remapped CORR UNCORR PENDING FAILED
 *   error CALL CODE     (the call of that name returns CODE, whatever it is)
 *   proc PID BYTES      (counts while the process is alive, in the pid namespace of who asks)
 *   slice UUID GI BYTES (a MIG instance)
 *
 * Who holds memory is read from the world: a process with FAKE_VRAM=INDEX:BYTES,… in its environment holds that much
 * while it has /dev/nvidiaMINOR open (a zombie has nothing open), FAKE_VRAM_SILENT: without being listed,
 * FAKE_VRAM_OPENER=PID: listed as that process, which may be gone. As with the real driver, only
 * processes of the caller's pid namespace are seen, with that namespace's numbers. `lag`: memory comes back late.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX 16
#define PROCS 512
typedef unsigned long long u64;
typedef struct { int pid; u64 bytes; int listed; } Proc; /* listed: the pid that is told, or 0 */
typedef struct { char uuid[96]; unsigned gi; u64 bytes; int gpu; } Slice;
typedef struct {
    char uuid[96], name[96], pci[32], error[16][64];
    int errors, code[16], procs, slices;
    unsigned minor, lost, load, memload, power, limit, temp, templimit, clock, memclock, clockmax;
    unsigned gen, genmax, width, widthmax, persistence, mig, remapped[4];
    u64 total, reserved, base, throttle, ecc, eccsum;
    Proc proc[PROCS];
    Slice slice[8];
} Gpu;
static Gpu gpus[MAX];
static int count, init_code;
static char driver[80], nvml[80];
static unsigned cuda, hang, lag, still;
/* what was seen to hold memory, to let it linger */
static struct { int gpu, pid; u64 bytes, seen; } past[PROCS];
static int pasts;

static u64 now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int alive(int pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    char *end = strrchr(text, ')');
    return end && end[2] != 'Z' && end[2] != 'X';
}

static void add(int gpu, int pid, u64 bytes, int listed) {
    if (gpu < 0 || gpu >= count || gpus[gpu].procs >= PROCS) return;
    Proc *p = &gpus[gpu].proc[gpus[gpu].procs++];
    p->pid = pid, p->bytes = bytes, p->listed = listed;
}

static int opened(int pid, unsigned minor) {
    char path[300], link[64], want[32];
    snprintf(want, sizeof want, "/dev/nvidia%u", minor);
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *files = opendir(path);
    struct dirent *entry;
    int found = 0;
    while (files && !found && (entry = readdir(files))) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, entry->d_name);
        ssize_t n = readlink(path, link, sizeof link - 1);
        if (n > 0) link[n] = 0, found = !strcmp(link, want);
    }
    if (files) closedir(files);
    return found;
}

static void scan_world(void) {
    static char text[1 << 17];
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    while (proc && (entry = readdir(proc))) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        int pid = atoi(entry->d_name);
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/environ", pid);
        FILE *f = fopen(path, "r");
        if (!f) continue;
        size_t n = fread(text, 1, sizeof text - 1, f);
        fclose(f);
        text[n] = 0;
        char *what = NULL;
        int listed = pid;
        for (char *at = text; at < text + n; at += strlen(at) + 1) {
            if (!strncmp(at, "FAKE_VRAM=", 10)) what = at + 10;
            if (!strncmp(at, "FAKE_VRAM_SILENT=", 17)) listed = 0;
            if (!strncmp(at, "FAKE_VRAM_OPENER=", 17)) listed = atoi(at + 17);
        }
        if (!what) continue;
        if (!alive(pid)) continue;
        while (*what) {
            char *rest;
            int gpu = (int)strtol(what, &rest, 10);
            if (*rest != ':') break;
            u64 bytes = strtoull(rest + 1, &rest, 10);
            if (gpu >= 0 && gpu < count && opened(pid, gpus[gpu].minor)) add(gpu, pid, bytes, listed);
            if (*rest != ',') break;
            what = rest + 1;
        }
    }
    if (proc) closedir(proc);
}

static u64 held(int gpu) { /* bytes of all holders, with what lingers */
    u64 sum = 0, now = now_ms();
    for (int i = 0; i < gpus[gpu].procs; i++) {
        Proc *p = &gpus[gpu].proc[i];
        sum += p->bytes;
        int k = 0;
        while (k < pasts && !(past[k].gpu == gpu && past[k].pid == p->pid)) k++;
        if (k == pasts && pasts < PROCS) pasts++;
        if (k < PROCS) past[k].gpu = gpu, past[k].pid = p->pid, past[k].bytes = p->bytes, past[k].seen = now;
    }
    for (int k = 0; k < pasts; k++)
        if (past[k].gpu == gpu && past[k].seen != now && now - past[k].seen < lag) sum += past[k].bytes;
    return sum;
}

static void load(int world) {
    Dl_info info;
    char path[4096], line[1024], key[64], value[512];
    dladdr((void *)load, &info);
    snprintf(path, sizeof path, "%s.scenario", info.dli_fname);
    static struct stat last;
    struct stat now;
    if (still && !stat(path, &now) && now.st_ino == last.st_ino) return; /* replaced by rename when it changes */
    if (stat(path, &last)) memset(&last, 0, sizeof last);
    count = 0, init_code = 0, hang = 0, lag = 0, cuda = 0, still = 0;
    FILE *f = fopen(path, "r");
    if (!f) { init_code = 9; return; }
    Gpu *g = NULL;
    while (fgets(line, sizeof line, f)) {
        value[0] = 0;
        if (sscanf(line, "%63s %511[^\n]", key, value) < 1 || key[0] == '#') continue;
        u64 n = strtoull(value, NULL, 0);
        if (!strcmp(key, "gpu")) {
            if (count == MAX) break;
            g = &gpus[count++];
            memset(g, 0, sizeof *g);
            g->minor = count - 1;
        }
#define TEXT(k, to) else if (!strcmp(key, k)) snprintf(to, sizeof to, "%.*s", (int)sizeof to - 1, value);
#define NUMBER(k, to) else if (!strcmp(key, k)) to = n;
        TEXT("driver", driver) TEXT("nvml", nvml) NUMBER("cuda", cuda) NUMBER("init", init_code) NUMBER("hang", hang)
        NUMBER("lag", lag) NUMBER("still", still)
        else if (!g) continue;
        TEXT("uuid", g->uuid) TEXT("name", g->name) TEXT("pci", g->pci) NUMBER("minor", g->minor)
        NUMBER("lost", g->lost) NUMBER("total", g->total) NUMBER("reserved", g->reserved) NUMBER("base", g->base)
        NUMBER("load", g->load) NUMBER("memload", g->memload) NUMBER("power", g->power) NUMBER("limit", g->limit)
        NUMBER("temp", g->temp) NUMBER("templimit", g->templimit) NUMBER("clock", g->clock)
        NUMBER("memclock", g->memclock) NUMBER("clockmax", g->clockmax) NUMBER("throttle", g->throttle)
        NUMBER("ecc", g->ecc) NUMBER("eccsum", g->eccsum) NUMBER("gen", g->gen) NUMBER("genmax", g->genmax)
        NUMBER("width", g->width) NUMBER("widthmax", g->widthmax) NUMBER("persistence", g->persistence)
        NUMBER("mig", g->mig)
        else if (!strcmp(key, "remapped"))
            sscanf(value, "%u %u %u %u", &g->remapped[0], &g->remapped[1], &g->remapped[2], &g->remapped[3]);
        else if (!strcmp(key, "error") && g->errors < 16) {
            if (sscanf(value, "%63s %d", g->error[g->errors], &g->code[g->errors]) == 2) g->errors++;
        } else if (!strcmp(key, "proc")) {
            int pid;
            u64 bytes;
            if (sscanf(value, "%d %llu", &pid, &bytes) == 2 && (world || still) && alive(pid)) add(count - 1, pid, bytes, pid);
        } else if (!strcmp(key, "slice") && g->slices < 8) {
            Slice *s = &g->slice[g->slices];
            if (sscanf(value, "%95s %u %llu", s->uuid, &s->gi, &s->bytes) == 3) s->gpu = count - 1, g->slices++;
        }
    }
    fclose(f);
    if (world && !still) scan_world();
    if (hang) sleep(hang);
}

/* Handles: GPU i is i+1; its MIG instance j is (i+1) + 100*(j+1). */
static Gpu *of(void *device, Slice **slice) {
    unsigned long at = (unsigned long)device;
    Gpu *g = &gpus[at % 100 - 1];
    if (slice) *slice = at >= 100 ? &g->slice[at / 100 - 1] : NULL;
    return g;
}

static int refused(Gpu *g, const char *call) {
    if (g->lost) return 15;
    for (int i = 0; i < g->errors; i++)
        if (!strcmp(g->error[i], call)) return g->code[i];
    return 0;
}

#define CHECK(world)                                     \
    load(world);                                         \
    Slice *slice;                                        \
    Gpu *g = of(device, &slice);                         \
    (void)slice;                                         \
    int no = refused(g, __func__);                       \
    if (no) return no;

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(0); return init_code; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
    static char text[64];
    if (code == 18) return "Driver/library version mismatch";
    if (code == 9) return "Driver Not Loaded";
    if (code == 15) return "GPU is lost";
    snprintf(text, sizeof text, "NVML error %d", code);
    return text;
}
static int give(const char *value, char *to, unsigned size) {
    if (strlen(value) + 1 > size) return 7;
    strcpy(to, value);
    return 0;
}
int nvmlSystemGetDriverVersion(char *to, unsigned size) { load(0); return give(driver, to, size); }
int nvmlSystemGetNVMLVersion(char *to, unsigned size) { load(0); return give(nvml, to, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { load(0); *to = (int)cuda; return 0; }
int nvmlDeviceGetCount_v2(unsigned *to) { load(0); *to = (unsigned)count; return init_code; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **to) {
    load(0);
    if ((int)index >= count) return 2;
    if (gpus[index].lost) return 15;
    *to = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *to, unsigned size) { CHECK(0) return give(slice ? slice->uuid : g->uuid, to, size); }
int nvmlDeviceGetName(void *device, char *to, unsigned size) { CHECK(0) return give(g->name, to, size); }
int nvmlDeviceGetMinorNumber(void *device, unsigned *to) { CHECK(0) *to = g->minor; return 0; }
typedef struct { char legacy[16]; unsigned domain, bus, dev, id, sub; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(void *device, Pci *to) {
    CHECK(0)
    memset(to, 0, sizeof *to);
    snprintf(to->bus_id, sizeof to->bus_id, "%s", g->pci);
    return 0;
}
typedef struct { unsigned gpu, memory; } Load;
int nvmlDeviceGetUtilizationRates(void *device, Load *to) { CHECK(0) to->gpu = g->load, to->memory = g->memload; return 0; }
#define SIMPLE(name, type, field) int name(void *device, type *to) { CHECK(0) *to = g->field; return 0; }
SIMPLE(nvmlDeviceGetPowerUsage, unsigned, power)
SIMPLE(nvmlDeviceGetEnforcedPowerLimit, unsigned, limit)
SIMPLE(nvmlDeviceGetCurrentClocksThrottleReasons, u64, throttle)
SIMPLE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, gen)
SIMPLE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, genmax)
SIMPLE(nvmlDeviceGetCurrPcieLinkWidth, unsigned, width)
SIMPLE(nvmlDeviceGetMaxPcieLinkWidth, unsigned, widthmax)
SIMPLE(nvmlDeviceGetPersistenceMode, unsigned, persistence)
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *to) { (void)sensor; CHECK(0) *to = g->temp; return 0; }
int nvmlDeviceGetTemperatureThreshold(void *device, int which, unsigned *to) { (void)which; CHECK(0) *to = g->templimit; return 0; }
int nvmlDeviceGetClockInfo(void *device, int which, unsigned *to) { CHECK(0) *to = which == 2 ? g->memclock : g->clock; return 0; }
int nvmlDeviceGetMaxClockInfo(void *device, int which, unsigned *to) { (void)which; CHECK(0) *to = g->clockmax; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int error, int counter, u64 *to) {
    (void)error;
    CHECK(0)
    *to = counter ? g->eccsum : g->ecc;
    return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    CHECK(0)
    *a = g->remapped[0], *b = g->remapped[1], *c = g->remapped[2], *d = g->remapped[3];
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *then) { CHECK(0) *now = *then = g->mig; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *to) { CHECK(0) *to = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **to) {
    CHECK(0)
    if ((int)index >= g->slices) return 6;
    *to = (void *)((unsigned long)device + 100 * (index + 1));
    return 0;
}
int nvmlDeviceGetGpuInstanceId(void *device, unsigned *to) { CHECK(0) if (!slice) return 3; *to = slice->gi; return 0; }

typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { u64 total, free, used; } Memory1;
int nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *to) {
    CHECK(1)
    if (slice) {
        to->total = slice->bytes, to->reserved = 0, to->used = slice->bytes / 2, to->free = slice->bytes - to->used;
        return 0;
    }
    to->total = g->total, to->reserved = g->reserved;
    to->used = g->base + held((int)(g - gpus));
    to->free = g->total - g->reserved - to->used;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory1 *to) {
    CHECK(1)
    to->total = g->total, to->used = g->reserved + g->base + held((int)(g - gpus));
    to->free = g->total - to->used;
    return 0;
}
typedef struct { unsigned pid; u64 used; unsigned gi, ci; } Info;
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *n, Info *to) {
    CHECK(1)
    unsigned have = 0, room = *n;
    for (int i = 0; i < g->procs; i++) have += g->proc[i].listed != 0;
    *n = have;
    if (have > room || (!to && have)) return 7;
    have = 0;
    for (int i = 0; to && i < g->procs; i++)
        if (g->proc[i].listed) {
            to[have].pid = (unsigned)g->proc[i].listed, to[have].used = g->proc[i].bytes;
            to[have].gi = to[have].ci = 0xFFFFFFFF;
            have++;
        }
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *n, Info *to) { (void)to; CHECK(0) *n = 0; return 0; }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *n, Info *to) { (void)to; CHECK(0) *n = 0; return 0; }
