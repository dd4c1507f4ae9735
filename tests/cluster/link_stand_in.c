/* A slow network between namespaces, in the place of `tc netem` where the kernel has none; link.py builds and starts it.
 *
 *     link_stand_in BITS_PER_SECOND SECONDS QUEUE_SECONDS NAMESPACE...
 *
 * Each namespace is a host, the 1st to the Nth, and gets a TAP device e0. What it sends passes three places:
 *
 *     leaving    a frame leaves its host when the bits of those before it are gone, and is SECONDS on the way
 *     switch     it goes to the host whose number is the last byte of the destination address, or to all others
 *     arriving   it reaches that host when the bits of those before it have arrived
 *
 * So both directions of a host's cable carry BITS_PER_SECOND, and a round trip takes twice SECONDS. A frame that
 * would wait for others longer than QUEUE_SECONDS, on leaving or on arriving, is dropped, as by any switch.
 *
 * Frames are exchanged with the kernel as TCP hands them to a network card that cuts segments itself: up to 64 KiB with
 * one struct virtio_net_hdr, which the other side takes as it is. That, and not the number of bytes, keeps the work
 * small. Such a frame counts as the bytes of its segments.
 *
 * Prints "ready" when the devices are there. Lines on stdin: "cut N" loses all from and to host N, "mend N" ends that;
 * the end of stdin ends the program, and the devices with it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/if.h>
#include <linux/if_arp.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_HOSTS = 64,
    MOST_BYTES = sizeof(struct virtio_net_hdr) + 14 + 65536, /* of a frame, as the kernel hands it over */
    HEADERS = 14 + 20 + 32,                                  /* of a segment: Ethernet, IPv4, TCP with time stamps */
    BATCH = 16,                                              /* frames read from one host before others have a turn */
};

struct frame {
    struct frame *next;
    int64_t due; /* ns: when it leaves the queue it is in; never earlier than that of the frame before */
    int64_t takes; /* ns: its bits, one after the other */
    size_t length;
    unsigned char data[]; /* struct virtio_net_hdr, then the Ethernet frame, destination address first */
};

struct queue {
    struct frame *first, **end;
    int64_t free; /* ns: when the bits of all that ever came are gone */
};

struct host {
    int tap, is_cut;
    struct queue leaving, arriving;
};

static struct host hosts[MOST_HOSTS];
static int count;
static double bits_per_second;
static int64_t delay, patience; /* ns */

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void append(struct queue *queue, struct frame *frame, int64_t due) {
    frame->next = NULL;
    frame->due = due;
    *queue->end = frame;
    queue->end = &frame->next;
}

static struct frame *take(struct queue *queue, int64_t time) {
    struct frame *frame = queue->first;
    if (!frame || frame->due > time) return NULL;
    queue->first = frame->next;
    if (!queue->first) queue->end = &queue->first;
    return frame;
}

static int64_t time_of(const struct frame *frame) {
    struct virtio_net_hdr header;
    memcpy(&header, frame->data, sizeof header);
    size_t bytes = frame->length - sizeof header;
    if (header.gso_type != VIRTIO_NET_HDR_GSO_NONE && header.gso_size && bytes > HEADERS)
        bytes += (bytes - HEADERS - 1) / header.gso_size * HEADERS; /* each segment but the first has them once more */
    return (int64_t)(8e9 * bytes / bits_per_second);
}

static void leave(struct host *from, struct frame *frame, int64_t time) {
    struct queue *queue = &from->leaving;
    int64_t begins = queue->free > time ? queue->free : time;
    if (begins - time > patience) {
        free(frame);
        return;
    }
    queue->free = begins + frame->takes;
    append(queue, frame, queue->free + delay);
}

/* The last bit of the frame is at the switch. Bits go on to the host as they come, so a cable that is free costs no
 * time of its own. */
static void arrive(struct host *to, struct frame *frame) {
    struct queue *queue = &to->arriving;
    int64_t due = queue->free + frame->takes;
    if (due < frame->due) due = frame->due;
    if (due - frame->due > patience) {
        free(frame);
        return;
    }
    queue->free = due;
    append(queue, frame, due);
}

static struct frame *copy(const struct frame *frame) {
    struct frame *made = malloc(sizeof *made + frame->length);
    if (!made) fail("memory");
    memcpy(made, frame, sizeof *made + frame->length);
    return made;
}

static void through_switch(struct host *from, struct frame *frame) {
    const unsigned char *address = frame->data + sizeof(struct virtio_net_hdr);
    int to_all = address[0] & 1, to = address[5] - 1;
    if (!to_all && to >= 0 && to < count && !from->is_cut) {
        arrive(&hosts[to], frame);
        return;
    }
    for (int host = 0; to_all && host < count && !from->is_cut; host++)
        if (&hosts[host] != from) arrive(&hosts[host], copy(frame));
    free(frame);
}

static void read_from(struct host *host) {
    for (int i = 0; i < BATCH; i++) {
        struct frame *frame = malloc(sizeof *frame + MOST_BYTES);
        if (!frame) fail("memory");
        ssize_t length = read(host->tap, frame->data, MOST_BYTES);
        if (length < (ssize_t)sizeof(struct virtio_net_hdr) + 14) {
            free(frame); /* nothing there (EAGAIN), or the device is down */
            return;
        }
        struct frame *shorter = realloc(frame, sizeof *frame + length);
        frame = shorter ? shorter : frame;
        frame->length = length;
        frame->takes = time_of(frame);
        leave(host, frame, now());
    }
}

static void move_what_is_due(int64_t time) {
    struct frame *frame;
    for (int host = 0; host < count; host++)
        while ((frame = take(&hosts[host].leaving, time))) through_switch(&hosts[host], frame);
    for (int host = 0; host < count; host++)
        while ((frame = take(&hosts[host].arriving, time))) {
            /* a device that is down, or has no memory, loses the frame: so does a card */
            if (!hosts[host].is_cut && write(hosts[host].tap, frame->data, frame->length) < 0 && errno == EBADFD)
                fail("writing to a host");
            free(frame);
        }
}

/* ns until a frame is due; negative where none waits. */
static int64_t until_next(int64_t time) {
    int64_t next = INT64_MAX;
    for (int host = 0; host < count; host++) {
        struct frame *first[] = {hosts[host].leaving.first, hosts[host].arriving.first};
        for (int i = 0; i < 2; i++)
            if (first[i] && first[i]->due < next) next = first[i]->due;
    }
    if (next == INT64_MAX) return -1;
    return next > time ? next - time : 0;
}

static void obey(void) {
    char lines[256];
    ssize_t length = read(STDIN_FILENO, lines, sizeof lines - 1);
    if (length <= 0) exit(0);
    lines[length] = 0;
    for (char *rest = lines, *line; (line = strsep(&rest, "\n"));) {
        char word[8];
        int host;
        if (sscanf(line, "%7s %d", word, &host) == 2 && host >= 1 && host <= count)
            hosts[host - 1].is_cut = strcmp(word, "cut") == 0;
    }
}

static void enter(const char *path) {
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) < 0) fail(path);
    close(space);
}

static int make_tap(const char *name, int number) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    enter(path);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_name = "e0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    if (ioctl(tap, TUNSETIFF, &request) < 0) fail("making a TAP device");
    request.ifr_hwaddr = (struct sockaddr){.sa_family = ARPHRD_ETHER, .sa_data = {2, 0, 0, 0, 0, number}};
    if (ioctl(tap, SIOCSIFHWADDR, &request) < 0) fail("naming a TAP device");
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) fail("TUNSETOFFLOAD");
    return tap;
}

int main(int words, char **word) {
    count = words - 4;
    if (count < 1 || count > MOST_HOSTS) return 2;
    bits_per_second = atof(word[1]);
    delay = (int64_t)(1e9 * atof(word[2]));
    patience = (int64_t)(1e9 * atof(word[3]));
    char own[64];
    snprintf(own, sizeof own, "/proc/self/fd/%d", open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    struct pollfd asked[MOST_HOSTS + 1];
    for (int host = 0; host < count; host++) {
        hosts[host].tap = make_tap(word[4 + host], host + 1);
        hosts[host].leaving.end = &hosts[host].leaving.first;
        hosts[host].arriving.end = &hosts[host].arriving.first;
        asked[host] = (struct pollfd){.fd = hosts[host].tap, .events = POLLIN};
    }
    enter(own);
    asked[count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    /* a network does not wait for a core of the hosts; where this is forbidden it does */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t wait = until_next(now());
        struct timespec timeout = {.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000};
        if (ppoll(asked, count + 1, wait < 0 ? NULL : &timeout, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int host = 0; host < count; host++)
            if (asked[host].revents & (POLLERR | POLLHUP))
                return 0; /* its namespace is gone */
            else if (asked[host].revents)
                read_from(&hosts[host]);
        if (asked[count].revents) obey();
        move_what_is_due(now());
    }
}
