-- Shared: earmarks. A ready job that fits a worker but never what is free there would wait for ever behind small ones that fill
-- every gap. Once it has waited for `earmark_ms` (60 s; 0 for never) and is the job that the worker would take if it were empty,
-- `tick` keeps the worker's machine for it: what it needs of that machine is granted to nobody else, but for more important jobs
-- and for those whose timeout ends before the job could begin anyhow. What lies beyond that goes on being granted.
-- At most one earmark a machine, one a job, 64 in all. It goes with the job's grant (whoever grants it), cancel or end, and when
-- the worker drains, leaves, begins anew, is set aside or is silent; whoever's room was withheld is rung then.
-- This file: what they keep. h_earmarking.lua: who gets one.
-- earmarks: machine -> job, and since when there has been room for it, 0 for never; the job's field `earmark`: its machine;
-- held:<node>, beside the holdings, so that a claim reads it with them: earmark -> `earmark <job> <sig> <owner> <prio> <worker>
-- <until_ms> <devices>`. until_ms: when all that ran there at first ends at the latest, 0 where that is not known; the devices
-- are chosen by the worker's own claims.

local FIELD, LONGEST_MS = 'earmark', 3600000

function H.earmark(text)
  local job, sig, owner, prio, worker, til, devices = string.match(text, '^earmark (%S+) (%S+) (%S+) (%d) (%S+) (%d+) (%S*)$')
  if not job then return nil end
  return {job = job, sig = sig, owner = owner, prio = tonumber(prio), worker = worker, until_ms = tonumber(til), devices = devices}
end

function H.earmark_of(P, node)
  local text = redis.call('HGET', P .. 'held:' .. node, FIELD)
  return text and H.earmark(text)
end

local function write_text(P, node, e)
  redis.call('HSET', P .. 'held:' .. node, FIELD, table.concat({'earmark', e.job, e.sig, e.owner, e.prio, e.worker,
             string.format('%d', e.until_ms), e.devices}, ' '))
end

function H.write_earmark(P, node, e)
  redis.call('HSET', P .. 'earmarks', node, e.job .. ' 0')
  redis.call('HSET', P .. 'rungsig', H.SOME_ARE_KEPT, '')
  redis.call('HSET', H.job(P, e.job), FIELD, node)
  write_text(P, node, e)
end

function H.unlist_earmark(P, node)
  redis.call('HDEL', P .. 'earmarks', node)
  if redis.call('EXISTS', P .. 'earmarks') == 0 then redis.call('HDEL', P .. 'rungsig', H.SOME_ARE_KEPT) end
end

-- the earmark of a machine goes, if it is this job's: what was withheld is there for all
function H.lift(P, node, job, now)
  redis.call('HDEL', H.job(P, job), FIELD)
  local e = H.earmark_of(P, node)
  if e and e.job ~= job then return end
  H.unlist_earmark(P, node)
  if redis.call('HDEL', P .. 'held:' .. node, FIELD) == 1 then H.poke_node(P, node, nil, now) end
end

-- a worker that leaves its machine, or takes nothing, has nothing kept for anybody
function H.lift_of(P, w, node, now)
  local e = node and H.earmark_of(P, node)
  if e and e.worker == w then H.lift(P, node, e.job, now) end
end

-- the job that is being granted needs no earmark any more, on this worker's machine or another. Where it takes what was kept here
-- for one behind it in its line, that one has the other machine instead
function H.lift_granted(P, w, room, job, node, now)
  local here = room.earmark
  local there = here and w.node ~= node and H.earmark_of(P, node)
  if there and there.job == job and there.sig == here.sig and there.owner == here.owner and there.prio == here.prio then
    redis.call('HDEL', H.job(P, job), FIELD)
    H.lift(P, w.node, here.job, now)
    there.job, room.earmark = here.job, nil
    H.write_earmark(P, node, there)
  else
    H.lift(P, node, job, now)
    if w.node == node then room.earmark = nil end
  end
end

-- a claim's room on a machine with an earmark
function H.keep_room(room, e, worker, mine, cpus)
  local need = H.amounts(e.sig)
  room.earmark, room.is_at = e, e.worker == worker
  room.kept_cpus = room.is_at and need.cpus or room.cpus - math.min(mine, cpus - need.cpus)
end

-- the devices that the job is to have: what it could take now, then what others hold, by name; nil where there are too few
local function choose(o, room, need, groups)
  local able, chosen, seen = {}, {}, {}
  local function add(lots)
    local found = {}
    for _, lot in ipairs(lots) do
      if lot.free >= need.vram and string.find(',' .. groups .. ',', ',' .. lot.group .. ',', 1, true) and not seen[lot.uuid] then
        seen[lot.uuid] = true
        found[#found + 1] = lot.uuid
      end
    end
    table.sort(found)
    for _, uuid in ipairs(found) do able[#able + 1] = uuid end
  end
  add(room.lots)
  add(o.lots)
  for i = 1, need.letter == 'g' and need.gpus or 0 do
    if not able[i] then return nil end
    chosen[i] = able[i]
  end
  return table.concat(chosen, ',')
end

-- where it was in vain: signature -> {until_ms, pause_ms} of a worker. It is not tried there again for a while, which doubles with
-- each time, up to an hour; of the last eight signatures it is known
function H.vain(text)
  local out = {}
  for sig, til, pause in string.gmatch(text or '', '(%S+) (%d+) (%d+)') do
    out[sig] = {until_ms = tonumber(til), pause_ms = tonumber(pause)}
  end
  return out
end

function H.note_vain(P, worker, sig, now)
  local key, pause = P .. 'worker:' .. worker, H.config(P, 'earmark_ms', 60000)
  local text = redis.call('HGET', key, 'in_vain') or ''
  local last, all = H.vain(text)[sig], {}
  if last and now < last.until_ms + LONGEST_MS then pause = math.max(pause, math.min(LONGEST_MS, 2 * last.pause_ms)) end
  all[1] = string.format('%s %d %d', sig, now + pause, pause)
  for other, times in string.gmatch(text, '(%S+) (%d+ %d+)') do
    if other ~= sig and #all < 8 then all[#all + 1] = other .. ' ' .. times end
  end
  redis.call('HSET', key, 'in_vain', table.concat(all, ' '))
end

-- the worker that an earmark is at sees whether it could ever serve it, and which devices are to come free for it
local function renew_choice(P, o, w, room, now)
  local e = room.earmark
  local groups, need = redis.call('HGET', P .. 'fits:' .. w.class, e.sig), H.amounts(e.sig)
  local devices = groups and need.disk <= o.disk and choose(o, room, need, groups)
  if not devices then
    H.note_vain(P, o.worker, e.sig, now)
    return false
  end
  if devices ~= e.devices then
    e.devices = devices
    write_text(P, w.node, e)
  end
  return true
end

-- a claim on a machine with an earmark: whether that still stands, and what of this room it leaves to others
function H.heed(P, o, w, room, now)
  local e = room.earmark
  local stands = redis.call('HGET', H.job(P, e.job), FIELD) == w.node
  if not stands or (e.worker == o.worker and not renew_choice(P, o, w, room, now)) then
    H.lift(P, w.node, e.job, now)
    room.earmark = nil
  end
end

-- what others may have of a room; who needs nothing of an amount may pass where nothing of it is left
local function beside(room)
  local e, need, lots, kept = room.earmark, H.amounts(room.earmark.sig), {}, {}
  for uuid in string.gmatch(e.devices, '[^,]+') do kept[uuid] = true end
  for _, lot in ipairs(room.lots) do
    if not kept[lot.uuid] then lots[#lots + 1] = lot end
  end
  return {cpus = math.max(0, room.cpus - room.kept_cpus), memory = math.max(0, room.memory - need.memory), lots = lots,
          disk = math.max(0, room.disk - (room.is_at and need.disk or 0))}
end

local function in_turn(P, w, room)
  local e = room.earmark
  local need, groups = H.amounts(e.sig), redis.call('HGET', P .. 'fits:' .. w.class, e.sig)
  local lots = groups and H.fit(room, need, groups)
  local seq = lots and redis.call('ZSCORE', P .. 'heads:' .. e.prio .. ':' .. e.owner, e.sig)
  if not seq then return nil end
  return {sig = e.sig, need = need, lots = lots, seq = tonumber(seq), owner = e.owner, prio = H.PRIORITIES[e.prio + 1]}
end

-- the timeout of the oldest job of a line, by which that may pass; nil for what has none, or takes time before it begins
local function timeout_of(P, sig, owner, prio, seq)
  local entry = string.format('%d-0', seq)
  local e = redis.call('XRANGE', H.stream(P, sig, owner, prio), entry, entry)
  local v = e[1] and redis.pcall('HMGET', H.job(P, e[1][2][2]), 'timeout_ms', 'prepare', 'count', 'lane')
  local timeout = v and not v.err and tonumber(v[1] or nil)
  return timeout and not v[2] and not v[3] and not v[4] and timeout or nil
end

-- what a worker takes next on a machine with an earmark
function H.pick_beside(P, w, room, now)
  local e = room.earmark
  local after = e.prio + 1
  local c = H.pick(P, w.class, room, 1, e.prio) or in_turn(P, w, room) or H.pick(P, w.class, beside(room), after)
  if c or e.until_ms <= now then return c end
  return H.pick(P, w.class, room, after, nil, function(sig, owner, prio, seq)
    local timeout = timeout_of(P, sig, owner, prio, seq)
    return timeout and now + timeout <= e.until_ms
  end)
end

-- what is written down of an idle worker's room: what others may have, and behind it all of it, for those that the earmark lets pass
function H.room_text(room, as_text)
  if not room.earmark then return as_text(room) end
  return as_text(beside(room)) .. ';' .. as_text(room) .. ';' .. room.earmark.prio .. ' ' .. string.format('%d', room.earmark.until_ms)
end

-- what a signature's lines have at their heads, or the one that is named has: the rank of the most important one, and the shortest
-- of the timeouts by which they may pass. Read once a ring, whatever the rooms are that it is compared with
function H.heads_of(P, sig, line)
  local out = {rank = math.huge, timeout_ms = math.huge}
  local function read(prio, owner)
    local seq = redis.call('ZSCORE', P .. 'heads:' .. prio .. ':' .. owner, sig)
    if not seq then return end
    out.rank = math.min(out.rank, tonumber(prio))
    out.timeout_ms = math.min(out.timeout_ms, timeout_of(P, sig, owner, prio, tonumber(seq)) or math.huge)
  end
  if line then read(line.prio, line.owner) return out end
  for _, prio in ipairs(H.PRIORITIES) do
    for _, owner in ipairs(redis.call('SRANDMEMBER', P .. 'waiting:' .. prio, 64)) do read(prio, owner) end
  end
  return out
end

-- whether one of these heads may have all the room of a machine with an earmark
function H.passes(room, heads, now) return heads.rank < room.prio or now + heads.timeout_ms <= room.until_ms end

-- a line goes on behind its head, which has left: a bell that passed a machine with an earmark, because it was for a job further
-- back, is made up for where that job is the next now and may have room there
function H.ring_next(P, sig, now, except, line)
  if H.heads_of(P, sig, line).timeout_ms < math.huge then H.ring(P, sig, now, except, line) end
end
