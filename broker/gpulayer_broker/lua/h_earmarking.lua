-- Shared: who gets an earmark (h_earmarks.lua), and whose goes: what `tick` looks at, a bounded piece of the queue at a time.

local FIELD, MOST, AT_ONCE, DEPTH, NODE_JOBS = 'earmark', 64, 8, 16, 256

-- when all that runs on a machine ends at the latest, by its timeouts; 0 where one has none
local function known_end(P, node)
  local held, last = redis.call('HKEYS', P .. 'held:' .. node), 0
  if #held > NODE_JOBS then return 0 end
  for _, ref in ipairs(held) do
    local v = redis.pcall('HMGET', H.job(P, string.match(ref, '^(.*)/') or ref), 'started_ms', 'timeout_ms', 'ride', 'parent')
    local started, timeout = not v.err and tonumber(v[1] or nil), not v.err and tonumber(v[2] or nil)
    if not started or not timeout or v[3] or v[4] then return 0 end
    last = math.max(last, started + timeout)
  end
  return last
end

local function make(P, w, c, job, now)
  local e = {job = job.id, sig = c.sig, owner = c.owner, prio = c.prio, worker = w.name, until_ms = known_end(P, w.node), devices = ''}
  H.write_earmark(P, w.node, e)
  job.earmark = w.node
  H.doubt_rooms(P, w.node)
  if redis.call('HEXISTS', P .. 'room', w.name) == 1 then H.wake(P, w.class, w.name, '', now) end
  return e
end

-- a worker that may have something kept for a job; nil where it takes nothing
local function facts(P, name, seen, now)
  local v = redis.call('HMGET', P .. 'worker:' .. name, 'class', 'node', 'state', 'slots', 'cpus', 'memory', 'quarantined_until',
                       'in_vain', 'heartbeat_ms')
  if not v[1] or v[3] ~= 'online' or tonumber(v[7] or '0') > now then return nil end
  if tonumber(seen) < H.fresh_since(v[9], now) then return nil end
  return {name = name, class = v[1], node = v[2], slots = tonumber(v[4]), cpus = tonumber(v[5]), memory = tonumber(v[6]),
          vain = H.vain(v[8])}
end

local function could_hold(w, need) return need.cpus <= math.min(w.slots, w.cpus) and need.memory <= w.memory end

-- what a worker has free, and what each attempt on its machine holds
local function ledger(P, w)
  local mine, cpus, memory, lots = w.slots, w.cpus, w.memory, {}
  for _, text in ipairs(redis.call('HVALS', P .. 'held:' .. w.node)) do
    local who, c, m = string.match(text, '^(%S+) (%d+) (%d+)$')
    if who then
      cpus, memory = cpus - c, memory - m
      if who == w.name then mine = mine - c end
      lots[#lots + 1] = {is_mine = who == w.name, cpus = tonumber(c), memory = tonumber(m)}
    end
  end
  return {mine = mine, cpus = cpus, memory = memory, lots = lots}
end

local function has_room(l, need) return need.cpus <= math.min(l.mine, l.cpus) and need.memory <= l.memory end

-- more jobs than one share a device of this worker
local function shares_devices(P, w)
  local info = redis.call('HGET', P .. 'worker:' .. w.name, 'info')
  return tonumber(string.match(info or '', '"gpu_share": *(%d+)') or '1') > 1
end

-- whether something smaller than the job runs here, of what the job lacks: the measure of what could starve, for another of that
-- size fits into the gap which it leaves. Who lacks nothing, or waits for what no end here brings, is left alone
local function is_large(P, w, need, groups, l)
  if #l.lots == 0 then return false end
  if need.letter == 'g' and (need.gpus > 1 or (need.vram > 0 and shares_devices(P, w))) then
    local room = has_room(l, need) and H.read_room(redis.call('HGET', P .. 'room', w.name))
    return not (room and not room.unknown and H.fit(room, need, groups))
  end
  for _, one in ipairs(l.lots) do
    if l.mine < need.cpus and one.is_mine and one.cpus < need.cpus then return true end
    if l.cpus < need.cpus and one.cpus < need.cpus then return true end
    if l.memory < need.memory and one.memory < need.memory then return true end
  end
  return false
end

local function shortage(l, need)
  local cpus = need.cpus > 0 and (need.cpus - math.min(l.mine, l.cpus)) / need.cpus or 0
  return math.max(cpus, need.memory > 0 and (need.memory - l.memory) / need.memory or 0)
end

-- the order in which an empty worker would take what waits; whose jobs have machines kept for them counts as holding those
local function sort(waiting, held)
  table.sort(waiting, function(a, b)
    if a.prio ~= b.prio then return a.prio < b.prio end
    if held[a.owner] ~= held[b.owner] then return held[a.owner] < held[b.owner] end
    return a.seq < b.seq
  end)
end

-- the heads of the lines that wait, the oldest of 64 owners a priority, 128 in all; and what their owners hold
local function lines(P, kept)
  local out, held = {}, {}
  for i, prio in ipairs(H.PRIORITIES) do
    local who, counts = H.owners_by_share(P, prio)
    local some, most = {}, math.max(2, math.floor(128 / math.max(1, #who)))
    for _, owner in ipairs(who) do
      local h = redis.call('ZRANGE', P .. 'heads:' .. prio .. ':' .. owner, 0, most - 1, 'WITHSCORES')
      for k = 1, #h, 2 do
        some[#some + 1] = {prio = i - 1, owner = owner, sig = h[k], need = H.amounts(h[k]), seq = tonumber(h[k + 1])}
      end
      held[owner] = counts[owner] or tonumber(redis.call('HGET', P .. 'owners', owner) or '0')
    end
    sort(some, held)
    for _, c in ipairs(some) do
      if #out < 128 and c.need then out[#out + 1] = c end
    end
  end
  for _, e in pairs(kept) do held[e.owner] = held[e.owner] and held[e.owner] + 1 end
  sort(out, held)
  return out, held
end

-- the jobs at the head of a line: id, since when it waits, earmark of each; what a worker has, or what is broken, is passed over
local function read(P, c, depth, now)
  local out, first = {}, string.format('%d-0', c.seq)
  for _, e in ipairs(redis.call('XRANGE', H.stream(P, c.sig, c.owner, c.prio), first, '+', 'COUNT', depth)) do
    local v = redis.pcall('HMGET', H.job(P, e[2][2]), 'queued_ms', FIELD, 'cancel', 'state', 'count')
    if not v.err and not v[3] and (v[4] == 'queued' or v[5]) then
      out[#out + 1] = {id = e[2][2], waited_ms = now - (tonumber(v[1] or nil) or now), earmark = v[2]}
    end
  end
  return out
end

-- the first of them that nothing is kept for
local function unmarked(P, c, now)
  c.jobs = c.jobs or read(P, c, 1, now)
  if c.jobs[1] and not c.jobs[1].earmark then return c.jobs[1] end
  if not c.is_read then c.jobs, c.is_read = read(P, c, DEPTH, now), true end
  for _, job in ipairs(c.jobs) do
    if not job.earmark then return job end
  end
end

local function any_waited(P, waiting, patience_ms, now)
  for _, c in ipairs(waiting) do
    local job = unmarked(P, c, now)
    if job and job.waited_ms >= patience_ms then return true end
  end
  return false
end

-- whether an attempt on a worker's machine holds a device, which comes free when it ends
local function a_device_is_held(P, w)
  local held = redis.call('HKEYS', P .. 'held:' .. w.node)
  for i = 1, math.min(#held, NODE_JOBS) do
    local lots = redis.pcall('HGET', H.job(P, string.match(held[i], '^(.*)/') or held[i]), 'lots')
    if type(lots) == 'string' and lots ~= '' then return true end
  end
  return #held > NODE_JOBS
end

-- whether a job that is not large waits for what no end here brings: it lacks nothing that the ledger knows, or has been first for
-- so long that it must be its disk, or devices that others than the queue's jobs use
local function is_stuck(P, w, c, job, patience_ms)
  if c.need.gpus == 0 and has_room(w.ledger, c.need) then return true end
  if job.waited_ms < 10 * patience_ms then return false end
  return c.need.disk > 0 or (c.need.letter == 'g' and not a_device_is_held(P, w))
end

-- the job that a worker would keep its machine for: the first in line that it could run, if that has waited for so long and is
-- large. One that is stuck keeps nobody from their turn, nor one for which this machine was kept in vain
local function first_for(P, w, waiting, patience_ms, now)
  for _, c in ipairs(waiting) do
    local vain = w.vain[c.sig]
    local may = w.fits[c.sig] and could_hold(w, c.need) and not (vain and now < vain.until_ms)
    local job = may and unmarked(P, c, now)
    if job then
      if job.waited_ms < patience_ms then return nil end
      w.ledger = w.ledger or ledger(P, w)
      if is_large(P, w, c.need, w.fits[c.sig], w.ledger) then return c, job end
      if not is_stuck(P, w, c, job, patience_ms) then return nil end
    end
  end
end

local function fits_of(P, class, waiting)
  local names, fits = {}, {}
  for i, c in ipairs(waiting) do names[i] = c.sig end
  for i, groups in ipairs(redis.call('HMGET', P .. 'fits:' .. class, unpack(names))) do fits[names[i]] = groups or nil end
  return fits
end

-- 256 workers, those that were heard last
local function askable(P, waiting, now)
  local out, fits = {}, {}
  local last = redis.call('ZREVRANGE', P .. 'workers', 0, 255, 'WITHSCORES')
  for i = 1, #last, 2 do
    local w = facts(P, last[i], last[i + 1], now)
    if w then
      fits[w.class] = fits[w.class] or fits_of(P, w.class, waiting)
      w.fits, out[#out + 1] = fits[w.class], w
    end
  end
  return out
end

-- the worker, of those with a job that they would keep their machine for, that is nearest to having room; and that job
local function best_place(P, workers, waiting, kept, patience_ms, now)
  local best
  for _, w in ipairs(workers) do
    local c, job = first_for(P, w, waiting, patience_ms, now)
    local other = kept[w.node]
    if c and (not other or c.prio < other.prio) then
      local lacks, lots = shortage(w.ledger, c.need), #w.ledger.lots
      if not best or lacks < best.lacks or (lacks == best.lacks and lots < best.lots) then
        best = {w = w, c = c, job = job, lacks = lacks, lots = lots}
      end
    end
  end
  return best
end

-- whether somebody holds one of the devices that are kept, or they are not chosen yet and could be held
local function awaits_devices(P, e, need, l)
  if need.letter ~= 'g' then return false end
  local keys = {}
  for uuid in string.gmatch(e.devices, '[^,]+') do keys[#keys + 1] = P .. 'device:' .. uuid end
  if #keys == 0 then return #l.lots > 0 end
  return redis.call('EXISTS', unpack(keys)) > 0
end

-- a worker that has room for the job, as far as the ledger tells, is told so, and loses the earmark where that changes nothing
local function is_served(P, w, e, since_ms, patience_ms, now)
  local need, l = H.amounts(e.sig), ledger(P, w)
  if not has_room(l, need) or awaits_devices(P, e, need, l) then
    if since_ms > 0 then redis.call('HSET', P .. 'earmarks', w.node, e.job .. ' 0') end
    return true
  end
  if since_ms == 0 then
    redis.call('HSET', P .. 'earmarks', w.node, string.format('%s %d', e.job, now))
    H.poke(P, w.name, now)
  end
  if since_ms == 0 or now - since_ms < patience_ms then return true end
  H.note_vain(P, w.name, e.sig, now)
  return false
end

-- whether an earmark still has a job that waits and a worker that could take it
local function stands(P, node, e, since_ms, patience_ms, now)
  local marked, state = unpack(redis.call('HMGET', H.job(P, e.job), FIELD, 'state'))
  local seen = marked == node and not H.FINAL[state] and redis.call('ZSCORE', P .. 'workers', e.worker)
  local w = seen and facts(P, e.worker, seen, now)
  if not w or w.node ~= node or redis.call('HEXISTS', P .. 'fits:' .. w.class, e.sig) == 0 then return false end
  return could_hold(w, H.amounts(e.sig)) and is_served(P, w, e, since_ms, patience_ms, now)
end

local function review(P, patience_ms, now)
  local kept, n, all = {}, 0, redis.call('HGETALL', P .. 'earmarks')
  for i = 1, #all, 2 do
    local node, e, job, since = all[i], H.earmark_of(P, all[i]), string.match(all[i + 1], '^(%S+) (%d+)$')
    if e and e.job == job and patience_ms > 0 and stands(P, node, e, tonumber(since), patience_ms, now) then
      kept[node], n = e, n + 1
    else
      H.lift(P, node, e and e.job or job or '', now)
      H.unlist_earmark(P, node)
    end
  end
  return kept, n
end

local function somebody_waits(P)
  local keys = {}
  for i, prio in ipairs(H.PRIORITIES) do keys[i] = P .. 'waiting:' .. prio end
  return redis.call('EXISTS', unpack(keys)) > 0
end

local function make_some(P, kept, most, patience_ms, now)
  local waiting, held = lines(P, kept)
  local workers = any_waited(P, waiting, patience_ms, now) and askable(P, waiting, now) or {}
  for _ = 1, most do
    local at = best_place(P, workers, waiting, kept, patience_ms, now)
    if not at then return end
    local node, owner = at.w.node, at.c.owner
    if kept[node] then H.lift(P, node, kept[node].job, now) end
    kept[node], held[owner] = make(P, at.w, at.c, at.job, now), held[owner] + 1
    sort(waiting, held)
  end
end

-- looks, at most ten times in the time that a job waits for an earmark, whether one goes or is to be made; ms until the next look
function H.look_at_earmarks(P, now)
  local patience_ms = H.config(P, 'earmark_ms', 60000)
  local kept, n = review(P, patience_ms, now)
  if patience_ms <= 0 or not somebody_waits(P) then return nil end
  local pause, last = math.max(1, patience_ms / 10), tonumber(redis.call('HGET', P .. 'clock', 'earmarks_ms') or '0')
  if now >= last and now < last + pause then return math.ceil(last + pause - now) end
  redis.call('HSET', P .. 'clock', 'earmarks_ms', now)
  if n < MOST then make_some(P, kept, math.min(AT_ONCE, MOST - n), patience_ms, now) end
  return math.ceil(pause)
end
