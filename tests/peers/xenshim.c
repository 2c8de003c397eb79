/*
 * LD_PRELOAD for Debian's xenstored and oxenstored on a machine without Xen: stands in for libxenctrl,
 * libxenevtchn and libxengnttab, and for the few files the daemons expect.
 *
 * Domains 0 to 31 always live. A domain's shared ring is a zeroed page of ours, so INTRODUCE works and
 * the "guest" says nothing. Event channels are a pipe nobody writes to.
 *
 * XENSHIM_DIR: a directory that takes the place of /proc/xen and of oxenstored's fixed run directory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <xenctrl.h>
#include <xenevtchn.h>
#include <xengnttab.h>

#define DOMAINS 32
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int handle; /* its address is every library handle */
static int event_pipe[2] = { -1, -1 };

/* The path itself, or its stand-in in XENSHIM_DIR. */
static const char *redirect(const char *path, char out[static 256])
{
    static const char *const prefixes[] = { "/proc/xen/", "/var/run/xenstored", "/run/xenstored" };
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t n = strlen(prefixes[i]);
        if (strncmp(path, prefixes[i], n))
            continue;
        snprintf(out, 256, "%s/%s", getenv("XENSHIM_DIR"), path + n);
        return out;
    }
    return path;
}

int open(const char *path, int flags, ...)
{
    char buf[256];
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list args;
        va_start(args, flags);
        mode = va_arg(args, mode_t);
        va_end(args);
    }
    return NEXT(open)(redirect(path, buf), flags, mode);
}
int open64(const char *path, int flags, ...) __attribute__((alias("open")));

int mkdir(const char *path, mode_t mode)
{
    char buf[256];
    return NEXT(mkdir)(redirect(path, buf), mode);
}

int unlink(const char *path)
{
    char buf[256];
    return NEXT(unlink)(redirect(path, buf));
}

int bind(int fd, const struct sockaddr *addr, socklen_t len)
{
    char buf[256];
    struct sockaddr_un un;
    if (addr->sa_family != AF_UNIX || len > sizeof un)
        return NEXT(bind)(fd, addr, len);
    memset(&un, 0, sizeof un);
    memcpy(&un, addr, len);
    const char *path = redirect(un.sun_path, buf);
    if (path == buf && (size_t)snprintf(un.sun_path, sizeof un.sun_path, "%s", path) >= sizeof un.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return NEXT(bind)(fd, (struct sockaddr *)&un, sizeof un);
}

/* oxenstored raises RLIMIT_NOFILE to nr_open, which needs privileges. */
int setrlimit(__rlimit_resource_t what, const struct rlimit *limit)
{
    (void)what, (void)limit;
    return 0;
}

xc_interface *xc_interface_open(xentoollog_logger *a, xentoollog_logger *b, unsigned flags)
{
    (void)a, (void)b, (void)flags;
    return (void *)&handle;
}

int xc_interface_close(xc_interface *xch)
{
    (void)xch;
    return 0;
}

int xc_domain_getinfo(xc_interface *xch, uint32_t first, unsigned max, xc_dominfo_t *info)
{
    unsigned n = 0;
    (void)xch;
    for (uint32_t domid = first; domid < DOMAINS && n < max; domid++, n++) {
        memset(&info[n], 0, sizeof info[n]);
        info[n].domid = domid;
        info[n].running = 1;
    }
    return (int)n;
}

int xc_domain_getinfolist(xc_interface *xch, uint32_t first, unsigned max, xc_domaininfo_t *info)
{
    unsigned n = 0;
    (void)xch;
    for (uint32_t domid = first; domid < DOMAINS && n < max; domid++, n++) {
        memset(&info[n], 0, sizeof info[n]);
        info[n].domain = domid;
        info[n].flags = XEN_DOMINF_running;
    }
    return (int)n;
}

static void *zeroed_page(void)
{
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED ? NULL : page;
}

void *xc_map_foreign_range(xc_interface *xch, uint32_t dom, int size, int prot, unsigned long mfn)
{
    (void)xch, (void)dom, (void)size, (void)prot, (void)mfn;
    return zeroed_page();
}

xengnttab_handle *xengnttab_open(xentoollog_logger *l, unsigned f) { (void)l, (void)f; return (void *)&handle; }
int xengnttab_close(xengnttab_handle *h) { (void)h; return 0; }
int xengnttab_set_max_grants(xengnttab_handle *h, uint32_t n) { (void)h, (void)n; return 0; }
int xengnttab_unmap(xengnttab_handle *h, void *at, uint32_t n) { (void)h; return munmap(at, n * 4096ul); }
void *xengnttab_map_grant_ref(xengnttab_handle *h, uint32_t dom, uint32_t ref, int prot)
{
    (void)h, (void)dom, (void)ref, (void)prot;
    return zeroed_page();
}

xenevtchn_handle *xenevtchn_open(xentoollog_logger *l, unsigned f)
{
    (void)l, (void)f;
    return pipe2(event_pipe, O_CLOEXEC) ? NULL : (void *)&handle;
}
xenevtchn_handle *xenevtchn_fdopen(struct xentoollog_logger *l, int fd, unsigned f) { (void)fd; return xenevtchn_open(l, f); }
int xenevtchn_close(xenevtchn_handle *h) { (void)h; return 0; }
int xenevtchn_fd(xenevtchn_handle *h) { (void)h; return event_pipe[0]; }
int xenevtchn_notify(xenevtchn_handle *h, evtchn_port_t port) { (void)h, (void)port; return 0; }
int xenevtchn_unmask(xenevtchn_handle *h, evtchn_port_t port) { (void)h, (void)port; return 0; }
int xenevtchn_unbind(xenevtchn_handle *h, evtchn_port_t port) { (void)h, (void)port; return 0; }
xenevtchn_port_or_error_t xenevtchn_bind_interdomain(xenevtchn_handle *h, uint32_t dom, evtchn_port_t port)
{
    (void)h, (void)port;
    return (int)(dom + 16);
}
xenevtchn_port_or_error_t xenevtchn_bind_virq(xenevtchn_handle *h, unsigned virq) { (void)h, (void)virq; return 2; }
xenevtchn_port_or_error_t xenevtchn_pending(xenevtchn_handle *h) { (void)h; return -1; }
